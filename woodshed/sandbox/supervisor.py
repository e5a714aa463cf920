"""First process inside a sandbox, which does there what the controller asks for. Standard library only.

Requests and replies are frames of byte fields over an inherited socket (`control.py` is the other end). One command
runs at a time, as a leader of its own session; when it ends, for whatever reason, every other process in the sandbox
is killed, so nothing outlives the command that started it.

Being process 1 of its own PID namespace, it cannot be killed or stopped from inside; being not dumpable, its memory
and its file descriptors cannot be reached through /proc or ptrace. When the controller is gone the socket closes, the
supervisor exits, and the kernel kills the rest.

Imports are few because they are half of what a sandbox costs to start: `signal` would import enum, functools and
collections, `ctypes` the types of C; what is needed of both is in the modules that they are made of.
"""

# ruff: noqa: PTH103, PTH118, PTH120, PTH208, SIM105

import _ctypes
import _signal as signal  # pyright: ignore[reportMissingImports]
import errno
import os
import resource
import select
import stat
import sys
import time

NICENESS = 10
"""Sandboxes give way to their controller, which may be keeping a GPU busy."""
TERM_GRACE_S = 0.5
WATCH_EVERY_S = 0.05
CHANNEL_BYTES = 64 << 20
MB = 1 << 20
PAGE = resource.getpagesize()


def receive(control):
    """The next frame: [4 bytes count] ([4 bytes length] [field]) * count. Exits when the controller has gone."""

    def exactly(size):
        parts = []
        while size:
            part = os.read(control, min(size, MB))
            if not part:
                os._exit(0)
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def number():
        return int.from_bytes(exactly(4), "little")

    return [exactly(number()) for _ in range(number())]


def send(control, fields):
    parts = [len(fields).to_bytes(4, "little")]
    for field in fields:
        parts += [len(field).to_bytes(4, "little"), field]
    view = memoryview(b"".join(parts))
    try:
        while view:
            view = view[os.write(control, view) :]
    except OSError:  # nobody is listening any more
        os._exit(0)


class Capture:
    """The first and the last `limit / 2` bytes of a stream, however long it is."""

    def __init__(self, limit):
        self.half, self.head, self.tail, self.total = max(limit // 2, 1), bytearray(), bytearray(), 0

    def feed(self, data):
        self.total += len(data)
        free = self.half - len(self.head)
        if free > 0:
            self.head += data[:free]
            data = data[free:]
        self.tail += data
        if len(self.tail) > 2 * self.half + MB:
            del self.tail[: -self.half]

    @property
    def truncated(self):
        return self.total > 2 * self.half

    def value(self):
        if not self.truncated:
            return bytes(self.head + self.tail)
        note = f"\n[... {self.total - 2 * self.half} bytes left out ...]\n".encode()
        return bytes(self.head) + note + bytes(self.tail[-self.half :])


def execute(control, workspace, limits, watcher, request):
    """Run one command to its end: [end, exit code, seconds, truncated, stdout, stderr, channel].

    `end` is b"exit", b"timeout", b"oom" or b"limit".
    """
    cwd, timeout_s, max_output, channel, stdin, argv, env = request
    started = time.monotonic()
    pipes = [os.pipe() for _ in range(3 + (channel == b"1"))]  # stdin, stdout, stderr, channel
    (stdin_read, feeder), *outputs = pipes
    inherited = [stdin_read, *(write_end for _, write_end in outputs)]
    try:
        os.chdir(os.path.join(workspace, cwd))
        pid = _start(argv.split(b"\0"), env.split(b"\0"), inherited, watcher)
    except OSError as error:
        for fd in sum(pipes, ()):
            os.close(fd)
        return [b"exit", b"127", b"0", b"0", b"", b"cannot start: %s\n" % str(error).encode(), b""]
    for fd in inherited:
        os.close(fd)
    sizes = [int(max_output), int(max_output), CHANNEL_BYTES]
    captures = {read_end: Capture(size) for size, (read_end, _) in zip(sizes, outputs)}  # noqa: B905
    for fd in (feeder, *captures):
        os.set_blocking(fd, False)
    until = started + float(timeout_s)
    end, note = _attend(control, limits, watcher, pid, captures, feeder, memoryview(stdin), until)
    code = _sweep(pid)
    if watcher:
        watcher.close()
    for fd, capture in captures.items():
        _drain(fd, capture)
        os.close(fd)
    out, err, *side = captures.values()
    if end == b"exit" and code in (-signal.SIGXFSZ, 128 + signal.SIGXFSZ):
        end, note = b"limit", b"a file grew past %d MB" % limits["file_mb"]
    if note:
        err.feed(b"\n[killed: %s]\n" % note)
    return [
        end,
        b"%d" % (code if code >= 0 else 128 - code) if end == b"exit" else b"",
        b"%f" % (time.monotonic() - started),
        b"%d" % any(capture.truncated for capture in captures.values()),
        out.value(),
        err.value(),
        side[0].value() if side else b"",
    ]


def _start(words, variables, fds, watcher):
    """Start a command in a session of its own with these descriptors as 0, 1, 2 and perhaps 3: its pid.

    posix_spawn does not copy our page tables, and 3 is never among `fds` (see `serve`).
    """
    env = dict(pair.split(b"=", 1) for pair in variables if pair)
    program = words[0]
    if b"/" not in program:
        paths = (folder + b"/" + program for folder in env.get(b"PATH", b"/usr/bin:/bin").split(b":"))
        program = next((path for path in paths if os.access(path, os.X_OK)), program)
    if watcher:
        return watcher.start([program, *words[1:]], env, fds)
    actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(fds)]
    ignored = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT]  # by Python, or by us
    return os.posix_spawn(program, words, env, file_actions=actions, setsid=True, setsigdef=ignored)


def _attend(control, limits, watcher, pid, captures, feeder, stdin, deadline):
    """Feed, drain and watch the command until it ends or must end: (end, note)."""
    leader = os.pidfd_open(pid)
    poll = select.poll()
    listener = watcher.listener if watcher else -1
    for fd in (control, leader, *captures, *([listener] if watcher else [])):
        poll.register(fd, select.POLLIN)
    poll.register(feeder, select.POLLOUT)
    end, note, watched = b"", b"", time.monotonic()
    while True:
        for fd, event in poll.poll(1000 * max(0.0, min(WATCH_EVERY_S, deadline - time.monotonic()))):
            if fd == listener:
                if event & select.POLLIN:
                    watcher.look()
                else:  # no process is left under the filter
                    poll.unregister(listener)
            elif fd == leader:
                poll.unregister(leader)
                deadline, end = 0.0, end or b"exit"
            elif fd == control:  # the controller changed its mind, or has gone
                end, note = receive(control)[1:]
            elif fd == feeder:
                try:
                    stdin = stdin[os.write(feeder, stdin) :] if event & select.POLLOUT else stdin[:0]
                except OSError:
                    stdin = stdin[:0]
                if not stdin:
                    poll.unregister(feeder)
                    os.close(feeder)
                    feeder = -1
            elif not _drain(fd, captures[fd], most=MB):
                poll.unregister(fd)
        now = time.monotonic()
        if not end and now - watched > WATCH_EVERY_S:
            watched = now
            end, note = _excess(limits, captures, pid, deadline)
        if now >= deadline and not end:
            end, deadline = b"timeout", now + TERM_GRACE_S
            os.killpg(pid, signal.SIGTERM)
        elif now >= deadline or end in (b"oom", b"limit"):
            break
    os.close(leader)
    if feeder >= 0:
        os.close(feeder)
    return end, note


def _excess(limits, captures, leader, deadline):
    """Limit that is exceeded, if any: (end, note). Reaps orphans that have ended on the way.

    A fork bomb makes the look at one process take a second: what needs no such look comes first.
    """
    out, err, *_ = captures.values()
    if out.total + err.total > limits["output_mb"] * MB:
        return b"limit", b"more than %d MB of output" % limits["output_mb"]
    if os.getpid() != 1:  # without a PID namespace there is no telling which processes are ours
        return b"", b""
    tasks, resident = 0, {}
    pids = [pid for pid in os.listdir("/proc") if pid.isdigit() and pid != "1"]
    crowd = b"limit", b"more than %d processes and threads" % limits["pids"]
    if len(pids) > limits["pids"]:
        return crowd
    for pid in pids:
        if time.monotonic() > deadline:
            return b"", b""
        try:
            fields = _contents(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] == b"Z" and fields[1] == b"1" and int(pid) != leader:
            os.waitpid(int(pid), os.WNOHANG)
            continue
        tasks += int(fields[17])
        resident[pid] = int(fields[21]) * PAGE
    if tasks > limits["pids"]:
        return crowd
    most = limits["memory_mb"] * MB
    if sum(resident.values()) > most:
        used = 0
        for pid, pages in resident.items():
            used += _proportional(pid, pages)
            if used > most:
                return b"oom", b"more than %d MB of memory" % limits["memory_mb"]
            if time.monotonic() > deadline:
                break
    return b"", b""


def _proportional(pid, resident):
    """Bytes in memory, with pages that several processes share counted once among them."""
    try:
        return int(_contents(f"/proc/{pid}/smaps_rollup").partition(b"\nPss:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        return resident


def _contents(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def _sweep(leader):
    """Kill and reap everything but ourselves; the leader's exit status (negative: a signal)."""
    status = -signal.SIGKILL
    if os.getpid() == 1:
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            try:
                os.kill(-1, signal.SIGKILL)  # in one pass of the kernel, so that no fork escapes it
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    if ended[0] == leader:
                        status = os.waitstatus_to_exitcode(ended[1])
            except (ProcessLookupError, ChildProcessError):
                break
            time.sleep(0.001)
        return status
    try:  # never kill(-1) outside a PID namespace
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        pass
    return os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1])


def _drain(fd, capture, most=4 * MB):
    """Read what is there; False at the end of the stream."""
    while most > 0:
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            return False
        capture.feed(data)
        most -= len(data)
    return True


def read(path, most):
    """[b"ok", data] of a regular file; never blocks on a pipe or a device."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EISDIR, "") if stat.S_ISDIR(info.st_mode) else OSError(errno.EINVAL, "")
        if info.st_size > int(most):
            raise OSError(errno.EFBIG, "")
        parts = []
        while part := os.read(fd, MB):
            parts.append(part)
        return [b"ok", b"".join(parts)]
    finally:
        os.close(fd)


def write(path, data):
    os.makedirs(os.path.dirname(path) or b".", exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "")
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)
    return [b"ok"]


def _restrain(limits):
    """Limits of each process, from here on; ours are small enough for us too."""
    os.nice(NICENESS)
    caps = {resource.RLIMIT_FSIZE: limits["file_mb"] * MB, resource.RLIMIT_CORE: 0}
    caps[resource.RLIMIT_NOFILE] = limits["open_files"]
    if limits["address_mb"]:
        caps[resource.RLIMIT_AS] = limits["address_mb"] * MB
    if limits["nproc"]:
        caps[resource.RLIMIT_NPROC] = limits["nproc"]
    for kind, most in caps.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def serve(control, workspace, limits, names):
    os.set_inheritable(control, False)
    if control != 3:
        os.dup2(0, 3, inheritable=False)  # so that no other descriptor is 3, which is the channel's number
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # pyright: ignore[reportArgumentType]
    if _ctypes.call_function(prctl, (4, 0, 0, 0, 0)) != 0:  # PR_SET_DUMPABLE: keep /proc/1 and ptrace shut
        sys.exit("prctl failed")
    os.umask(0o022)
    _restrain(limits)
    watcher = None
    if names is not None or limits["moves"]:
        sys.path.insert(0, os.path.dirname(__file__))
        from watcher import Watcher  # pyright: ignore[reportMissingImports]

        try:
            watcher = Watcher(names, workspace)
        except OSError as error:
            if names is not None:
                sys.exit(f"cannot watch commands: {error}")
    send(control, [b"ready"])
    while True:
        operation, *fields = receive(control)
        try:
            if operation == b"exec":
                reply = execute(control, workspace, limits, watcher, fields)
            elif operation == b"stop":  # came too late: the command had ended
                continue
            elif operation == b"ping":
                reply = [b"ok"]
            elif operation == b"touched":
                reply = watcher.collect() if watcher else []
            else:
                path, argument = fields
                reply = {b"read": read, b"write": write}[operation](os.path.join(workspace, path), argument)
        except (OSError, ValueError) as error:  # ValueError: a NUL byte in a path
            reply = [b"error", b"%d" % (getattr(error, "errno", 0) or errno.EINVAL)]
        send(control, reply)


if __name__ == "__main__":
    socket_fd, workspace, *words = sys.argv[1:]
    limits = {
        name: int(value) for name, _, value in (word.partition("=") for word in words) if name != "watch"
    }
    watched = [word[6:] for word in words if word.startswith("watch=")]
    serve(
        int(socket_fd),
        os.fsencode(workspace),
        limits,
        os.fsencode(watched[0]).split(b",") if watched else None,
    )
