"""Sees which files the processes of a command open, make, remove and run, whatever program does it. One file, as
`supervisor.py`, which imports it inside a watched sandbox. Standard library only.

Every command starts under a system call filter that stops these calls until a listener has looked at them (seccomp
user notification, Linux 5.5; see seccomp_unotify(2)). The listener reads the path from the caller's memory, follows
links, notes the file and lets the call go on. Static programs, shells, other languages and Python without its site
folder are seen alike, which an audit hook or a preloaded library would not do.

What it does not see: names that are listed and never opened; a file opened through a path that another thread rewrites
between look and call; bytes that pass between processes. io_uring, which opens files without system calls, is refused.

It also lets folders be renamed. An overlay refuses that (EXDEV) for a folder of its lower layers; so before such a call
goes on, the folder is replaced by a copy of it in the upper layer, where renaming works. A sandbox that is not watched
has a listener for renames alone.
"""

# ruff: noqa: PTH101, PTH102, PTH104, PTH115, PTH116, PTH120, PTH211, SIM105

import _ctypes
import _signal as signal  # pyright: ignore[reportMissingImports]
import _socket
import array
import errno
import fcntl
import os
import select
import stat
import struct

MOST = 20_000
"""Entries kept between two collections."""
PATH_BYTES = 4096
COMMAND_CHARS = 200
ORDINARY = (b"/usr/", b"/lib", b"/bin/", b"/sbin/", b"/etc/", b"/opt/python/", b"/env/", b"/sys/")
ORDINARY += (b"/dev/null", b"/dev/urandom", b"/dev/tty", b"/dev/zero")
"""Reads below these are not noted, but for `names`; nobody can write there."""

# number: (kind, arguments that hold (folder, path), argument that holds flags or a command's words);
# folder -1: the working directory
OPEN, OPEN2, EXEC, CHANGE, LINK = "open", "openat2", "exec", "change", "link"
MACHINES = {
    "x86_64": (
        0xC000003E,
        {
            2: (OPEN, ((-1, 0),), 1),
            85: (CHANGE, ((-1, 0),), 0),  # creat
            257: (OPEN, ((0, 1),), 2),
            437: (OPEN2, ((0, 1),), 2),
            59: (EXEC, ((-1, 0),), 1),
            322: (EXEC, ((0, 1),), 2),
            76: (CHANGE, ((-1, 0),), 0),  # truncate
            82: (CHANGE, ((-1, 0), (-1, 1)), 0),  # rename, renameat, renameat2
            264: (CHANGE, ((0, 1), (2, 3)), 0),
            316: (CHANGE, ((0, 1), (2, 3)), 0),
            86: (LINK, ((-1, 0), (-1, 1)), 0),  # link, linkat
            265: (LINK, ((0, 1), (2, 3)), 0),
            87: (CHANGE, ((-1, 0),), 0),  # unlink, unlinkat
            263: (CHANGE, ((0, 1),), 0),
            88: (CHANGE, ((-1, 1),), 0),  # symlink, symlinkat
            266: (CHANGE, ((1, 2),), 0),
        },
        425,
        317,
        (319, 447, 29, 64, 68, 240, 248),
    ),
    "aarch64": (
        0xC00000B7,
        {
            56: (OPEN, ((0, 1),), 2),
            437: (OPEN2, ((0, 1),), 2),
            221: (EXEC, ((-1, 0),), 1),
            281: (EXEC, ((0, 1),), 2),
            45: (CHANGE, ((-1, 0),), 0),
            38: (CHANGE, ((0, 1), (2, 3)), 0),
            276: (CHANGE, ((0, 1), (2, 3)), 0),
            37: (LINK, ((0, 1), (2, 3)), 0),
            35: (CHANGE, ((0, 1),), 0),
            36: (CHANGE, ((1, 2),), 0),
        },
        425,
        277,
        (279, 447, 194, 190, 186, 180, 217),
    ),
}
ARCHITECTURE, CALLS, IO_URING_SETUP, SECCOMP, HOARDS = MACHINES.get(os.uname().machine, (0, {}, 0, 0, ()))
"""HOARDS: memfd_create, memfd_secret, shmget, semget, msgget, mq_open and add_key, which no sandbox has: they make what
holds memory outside of any process and any folder, where no limit sees it."""

RENAMES = {82, 264, 316} if ARCHITECTURE == 0xC000003E else {38, 276}
EXCHANGE = 2
MOST_COPIED = 256 << 20
"""Bytes of a folder that is copied so that it can be renamed, an empty file counted as 4096."""
DEEPEST = 100
"""Folders inside each other in such a folder."""

ALLOW, NOTIFY, REFUSE = 0x7FFF0000, 0x7FC00000, 0x00050000 | errno.ENOSYS
RECEIVE, SEND, SET_FLAGS = 0xC0502100, 0xC0182101, 0x40082104
NOTICE = struct.Struct("QIIiIQ6Q")
ANSWER = struct.Struct("QqiI")
GO_ON = 1
AT_FDCWD = (1 << 32) - 100


def program(calls, refused):
    """The filter: notify on these calls of this machine, refuse others, and with them other machines' calls; allow
    the rest."""
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    tests = [(equal, number, "notify") for number in calls]
    tests += [(equal, number, "refuse") for number in refused]
    tests += [(at_least, 0x40000000, "refuse")] if refused else []  # x32
    places = {"refuse": 5 + len(tests), "notify": 6 + len(tests)}
    other = REFUSE if refused else ALLOW
    lines = [(load, 0, 0, 4), (equal, 1, 0, ARCHITECTURE), (answer, 0, 0, other), (load, 0, 0, 0)]
    lines += [(code, places[to] - at - 1, 0, value) for at, (code, value, to) in enumerate(tests, 4)]
    lines += [(answer, 0, 0, ALLOW), (answer, 0, 0, REFUSE), (answer, 0, 0, NOTIFY)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def install(calls, refused):
    """Put this process and its future children under the filter; the listener's descriptor, negative on failure."""
    code = array.array("B", program(calls, refused))
    address, size = code.buffer_info()
    header = struct.pack("HxxxxxxQ", size // 8, address)
    call = _ctypes.dlsym(_ctypes.dlopen(None, 0), "syscall")  # pyright: ignore[reportArgumentType]
    return _ctypes.call_function(call, (SECCOMP, 1, 8, header))  # set a filter, with a new listener


class Watcher:
    """The listener of one command at a time, and what was seen since the last collection.

    Raises:
        OSError: this kernel or machine cannot do it.
    """

    def __init__(self, names, workspace=b"/workspace"):
        """`names` as in `SandboxSpec.watch`; with None only renames are looked at, and nothing is kept."""
        self.keeps = names is not None
        self.names = frozenset(names or ())
        self.workspace = workspace
        self.listener = -1
        self.seen = {}
        self.commands = {}
        if not CALLS:
            raise OSError(errno.ENOSYS, f"no table of system calls for {os.uname().machine}")
        pid = self.start([b"/bin/true"], {}, [])
        poll = select.poll()
        poll.register(self.listener, select.POLLIN)
        while poll.poll(2000)[0][1] & select.POLLIN:
            self.look()
        os.waitpid(pid, 0)
        self.close()
        self.seen.clear()

    def start(self, words, env, fds):
        """Start a command under the filter, with these descriptors as 0, 1, 2 and perhaps 3: its pid."""
        ours, theirs = _socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                calls, refused = (CALLS, (IO_URING_SETUP,)) if self.keeps else (RENAMES, ())
                _become(words, env, fds, theirs, calls, refused)
            finally:
                os._exit(127)
        theirs.close()
        try:
            data, parts, *_ = ours.recvmsg(64, _socket.CMSG_SPACE(4))
            if not parts:
                raise OSError(errno.ENOSYS, data.decode() or "the command ended before it began")
            self.listener = struct.unpack("i", parts[0][2][:4])[0]
            os.set_inheritable(self.listener, False)
        finally:
            ours.close()
        try:
            fcntl.ioctl(self.listener, SET_FLAGS, 1)  # wake callers on our core (Linux 6.6)
        except OSError:
            pass
        self.commands = {pid: b" ".join(words)}
        if self.keeps:
            self._keep(b"exec", words[0], pid)  # its memory is ours until then, and closed to us
        return pid

    def look(self):
        """Note one call that waits, and let it go on."""
        buffer = bytearray(NOTICE.size)
        try:
            fcntl.ioctl(self.listener, RECEIVE, buffer)
        except OSError:  # the caller was killed meanwhile
            return
        number, pid, _, call, _, _, *values = NOTICE.unpack(buffer)
        try:
            self._note(pid, call, values)
        except (OSError, ValueError, KeyError):
            pass  # unreadable memory, no such file: the call will fail by itself
        try:
            fcntl.ioctl(self.listener, SEND, ANSWER.pack(number, 0, 0, GO_ON))
        except OSError:
            pass

    def _note(self, pid, call, values):
        kind, places, flags_at = CALLS[call]
        memory = os.open(b"/proc/%d/mem" % pid, os.O_RDONLY)
        try:
            flags = values[flags_at]
            if kind == OPEN2:
                flags = int.from_bytes(os.pread(memory, 8, flags), "little")
            texts = [_text(memory, values[path]) for _, path in places]
            if call in RENAMES:
                self._ease(
                    pid,
                    texts,
                    [_base(pid, values, at) for at, _ in places],
                    values[4] if call == max(RENAMES) else 0,
                )
            if not self.keeps:
                return
            command = _words(memory, flags) if kind == EXEC else None
        finally:
            os.close(memory)
        writes = kind in (CHANGE, LINK) or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        mode = b"exec" if kind == EXEC else b"write" if writes else b"read"
        modes = [b"read", mode] if kind == LINK else [mode] * len(places)
        for text, (folder, _), mode in zip(texts, places, modes, strict=True):
            if mode == b"read" and text.startswith(ORDINARY) and self._ordinary(text):
                continue
            at = AT_FDCWD if folder < 0 else values[folder] & 0xFFFFFFFF
            path = _locate(
                pid, at, text, follow=kind not in (CHANGE, LINK), make=mode == b"write", empty=kind == EXEC
            )
            if path and not (mode == b"read" and path.startswith(ORDINARY) and self._ordinary(path)):
                self._keep(mode, path, pid, command)
        if kind == EXEC:
            self.commands.pop(pid, None)

    def _ease(self, pid, texts, folders, flags):
        """Make a folder of the workspace renameable, and where two are exchanged both."""
        source, target = (
            _real(text if text.startswith(b"/") else folder + text)
            for text, folder in zip(texts, folders, strict=True)
        )
        inside = self.workspace + b"/"
        if not (source.startswith(inside) and target.startswith(inside)):
            return
        for folder in (source, target) if flags & EXCHANGE else (source,):
            if stat.S_ISDIR(os.lstat(folder).st_mode):
                moved = unmerge(folder)
                for path in moved if self.keeps else ():
                    self._keep(b"write", path, pid)

    def _ordinary(self, path):
        if b"/../" in path:
            return False
        return not self.names or self.names.isdisjoint(part.partition(b".")[0] for part in path.split(b"/"))

    def _keep(self, mode, path, pid, command=None):
        command = command or self.commands.get(pid)
        if command is None:
            line = os.open(b"/proc/%d/cmdline" % pid, os.O_RDONLY)
            command = os.read(line, COMMAND_CHARS).rstrip(b"\0").replace(b"\0", b" ")
            os.close(line)
            self.commands[pid] = command
        entry = (mode, path, command[:COMMAND_CHARS])
        if entry in self.seen or len(self.seen) < MOST:
            self.seen[entry] = self.seen.get(entry, 0) + 1

    def collect(self):
        """[mode, path, command, count] * n, flat, as fields of a frame; and forget them."""
        fields = [part for entry, count in self.seen.items() for part in (*entry, b"%d" % count)]
        self.seen = {}
        return fields

    def close(self):
        if self.listener >= 0:
            os.close(self.listener)
        self.listener = -1


def _text(memory, address):
    return os.pread(memory, PATH_BYTES, address).partition(b"\0")[0]


def _words(memory, address):
    """The beginning of a command line, of which an array of pointers lies at `address`."""
    data = os.pread(memory, 8 * 32, address)
    words = []
    for (pointer,) in struct.iter_unpack("Q", data[: len(data) // 8 * 8]):
        if not pointer or sum(map(len, words)) > COMMAND_CHARS:
            break
        words.append(_text(memory, pointer))
    return b" ".join(words)


def _base(pid, values, folder):
    at = AT_FDCWD if folder < 0 else values[folder] & 0xFFFFFFFF
    return b"/proc/%d/cwd/" % pid if at == AT_FDCWD else b"/proc/%d/fd/%d/" % (pid, at)


def _real(path):
    """The path without links on the way to its last part, which need not exist."""
    folder, _, name = path.rstrip(b"/").rpartition(b"/")
    fd = os.open(folder or b"/", os.O_PATH | os.O_DIRECTORY)
    try:
        return os.readlink(b"/proc/self/fd/%d" % fd).rstrip(b"/") + b"/" + name
    finally:
        os.close(fd)


def unmerge(folder):
    """Replace a folder that an overlay will not rename by a copy that it will; the files that were copied.

    What cannot be copied (unreadable, too large, a device) is left, and then the rename fails as it did.
    """
    spare = b"%s/.woodshed-%s" % (os.path.dirname(folder), os.urandom(8).hex().encode())
    try:
        os.rename(folder, spare)
        os.rename(spare, folder)
        return []
    except OSError as error:
        if error.errno != errno.EXDEV:
            return []
    copied = []
    try:
        copied = _copy(folder, spare)
    except OSError:
        _delete(spare)
        return []
    _delete(folder)
    os.rename(spare, folder)
    return copied


def _copy(source, target):
    """Copy a tree with modes and times; the paths of what is no folder. Nothing of it may be hard to delete later."""
    waiting, folders, copied, left = [(source, target)], [], [], MOST_COPIED
    while waiting:
        old, new = waiting.pop()
        if not os.access(old, os.R_OK | os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, "")
        if old.count(b"/") - source.count(b"/") > DEEPEST:
            raise OSError(errno.ENAMETOOLONG, "")
        os.mkdir(new, 0o700)
        folders.append((new, os.stat(old)))
        with os.scandir(old) as entries:
            for entry in entries:
                info, into = entry.stat(follow_symlinks=False), new + b"/" + entry.name
                left -= max(4096, info.st_size)
                if left < 0:
                    raise OSError(errno.EFBIG, "")
                if stat.S_ISDIR(info.st_mode):
                    waiting.append((entry.path, into))
                else:
                    _copy_file(entry.path, into, info)
                    copied.append(entry.path)
    for folder, info in reversed(folders):
        os.chmod(folder, stat.S_IMODE(info.st_mode))
        os.utime(folder, ns=(info.st_atime_ns, info.st_mtime_ns))
    return copied


def _copy_file(old, new, info):
    if stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(old), new)
    elif stat.S_ISFIFO(info.st_mode):
        os.mkfifo(new)
    elif not stat.S_ISREG(info.st_mode):
        raise OSError(errno.ENODEV, "")
    else:
        source = os.open(old, os.O_RDONLY)
        target = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            while os.sendfile(target, source, None, 1 << 24):
                pass
            os.fchmod(target, stat.S_IMODE(info.st_mode))
        finally:
            os.close(source)
            os.close(target)
    os.utime(new, ns=(info.st_atime_ns, info.st_mtime_ns), follow_symlinks=False)


def _delete(tree):
    """Delete a tree as far as that is possible."""
    waiting, folders = [tree], []
    while waiting:
        folders.append(waiting.pop())
        try:
            entries = list(os.scandir(folders[-1]))
        except OSError:
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
            else:
                _quietly(os.unlink, entry.path)
    for folder in reversed(folders):
        _quietly(os.rmdir, folder)


def _quietly(remove, path):
    try:
        remove(path)
    except OSError:
        pass


def _become(words, env, fds, line, calls, refused):
    """In the child: the command's descriptors, session and signals; then the filter, then the command."""
    os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    for name in ("SIGPIPE", "SIGXFSZ", "SIGINT"):  # ignored by Python, or by the supervisor
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    listener = install(calls, refused)
    if listener < 0:
        line.send(b"the kernel refuses a listener for system calls")
        os._exit(127)
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", listener))]
    line.sendmsg([b"+"], rights)
    try:
        os.execve(words[0], words, env)
    except OSError as error:
        os.write(2, b"cannot start: %s\n" % str(error).encode())


def _locate(pid, at, text, *, follow, make, empty):
    """The absolute path of a file that exists, or is about to be made; None for folders and what is not there."""
    if text.startswith(b"/"):
        base = b""
        if text.startswith((b"/proc/self/", b"/proc/thread-self/")):
            text = b"/proc/%d/%s" % (pid, text.split(b"/", 3)[3])
    elif text or empty:
        base = b"/proc/%d/cwd/" % pid if at == AT_FDCWD else b"/proc/%d/fd/%d/" % (pid, at)
        if not text:
            base = base[:-1]
    else:
        return None
    whole = base + text
    flags = os.O_PATH | (0 if follow else os.O_NOFOLLOW)
    try:
        fd = os.open(whole, flags)
        name = b""
    except FileNotFoundError:
        if not make:
            return None
        folder, _, name = whole.rstrip(b"/").rpartition(b"/")
        fd = os.open(folder or b"/", os.O_PATH)
    try:
        if not name and os.fstat(fd).st_mode & 0o170000 == 0o040000:
            return None
        real = os.readlink(b"/proc/self/fd/%d" % fd)
    finally:
        os.close(fd)
    return real.rstrip(b"/") + b"/" + name if name else real
