"""Run folders, and the machine that a run was made on."""
