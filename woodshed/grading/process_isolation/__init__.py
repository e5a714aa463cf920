"""Tests in one process, the code under test in another: what they exchange is written values and numbered objects.

The tests' process imports stand-ins for the repository's packages. A call goes over a socket to the process that holds
the real ones, which answers with a value (None, numbers, text, built-in containers of these, some types of the standard
library, by exact type) or with the number of an object that stays where it is. Both sides do the same, so callbacks,
subclasses, generators, context managers, exceptions, warnings, log records and printed text work. Tests that need more
(frames, a patched clock, shared memory) are found when a task is made, and judged in the ordinary run alone.

No code crosses. The tests' side (`tests_side`) runs no line of the repository:
- names that it is told must be in a table of harmless types and functions (`values.SAFE`);
- it does what it is asked only to objects that it lent itself, never to values; of these it gives away neither private
  names nor anything that belongs to pytest, and nobody replaces a method of them (`lending`);
- it imports from writable folders only what was there before the other process began, and no bytecode (`imports`);
- it neither evaluates text nor unpickles for its tests (`imports.guard`): the text could be the other side's.
- what a stand-in is compared with, it is not told before it has said what it is (`commitments`);
- an assertion that failed has failed, whichever code of the other process catches it.
The other side (`code_side`) inherits one descriptor, and a filter of system calls keeps it from tracing, reading, and
signalling the tests' process (`confinement`). Messages are bounded in bytes, depth and number (`line`).

Standard library only. A session has a copy of this folder, which both processes import under a name drawn for it.
"""
