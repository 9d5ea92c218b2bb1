"""What python_tests starts by its path: a supervisor, and the runner that it forks.

The supervisor reads the job (JSON) from stdin, forks, kills all that the runner left at the end or
at the time-out, and prints the score. The runner runs code and tests and writes its score behind a
key: an exit, a print or an early return can't pass for success. Before the code begins the key has
gone into a thread, whose variables no frame of the code leads to.

What the tests see of the code's results is plain data (python_plain.py).
"""

import _thread
import ast
import builtins
import ctypes
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
import types

# Started by its path, apart from the package; the code is to find neither of the two.
sys.path.append(os.path.dirname(os.path.abspath(__file__)))
from python_plain import PLAIN_MODULES, Refused, all_classes, helpers, seen_plainly

del sys.path[-1], sys.modules["python_plain"]

CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
FILE_MIB, FILES = 16, 64
REFUSED = frozenset(
    "os.fork os.forkpty os.posix_spawn os.exec os.system pty.spawn subprocess.Popen os.kill "
    "os.killpg signal.pthread_kill sys.settrace sys.setprofile sys._getframe sys._current_frames "
    "gc.get_objects gc.get_referrers resource.setrlimit resource.prlimit".split()
)
CHANGES = frozenset(
    "os.remove os.rename os.rmdir os.mkdir os.chmod os.chown os.link os.symlink os.truncate "
    "os.utime shutil.rmtree".split()
)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
FRAMES = frozenset("tb_frame gi_frame cr_frame ag_frame".split())
LIBRARY = os.path.dirname(os.__file__) + os.sep
ASSERT = "try:\n    pass\nexcept Exception:\n    __failed__.add({0})\nelse:\n    __held__.add({0})"


def supervise() -> None:
    job = json.load(sys.stdin)
    libc = ctypes.CDLL(None)
    _isolate(libc)
    # After the name spaces: entering one clears the first. It says that the caller was killed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    key_out, key_in = os.pipe()
    score_out, score_in = os.pipe()
    runner = os.fork()
    if runner == 0:
        try:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            _run(job, key_out, score_in)
        finally:
            os._exit(1)
    try:
        os.close(score_in)
        key = os.urandom(16).hex()
        os.write(key_in, key.encode())
        os.close(key_in)
        score = _score(score_out, key, job["timeout_s"])
    finally:
        _kill_children()
    print(score)


def _isolate(libc: ctypes.CDLL) -> None:
    """No network and process ids of its own; the second form is for those who aren't root."""
    spaces = CLONE_NEWNET | CLONE_NEWPID
    if libc.unshare(spaces) != 0 and libc.unshare(spaces | CLONE_NEWUSER) != 0:
        libc.unshare(CLONE_NEWNET | CLONE_NEWUSER)


def _score(pipe: int, key: str, timeout_s: float) -> float:
    """What stands behind the key; 0 if the runner ends without it or runs out of time."""
    ready, _, _ = select.select([pipe], [], [], timeout_s)
    if not ready:
        return 0.0
    said, _, score = os.read(pipe, 128).decode(errors="replace").partition(" ")
    return float(score) if said == key else 0.0


def _kill_children() -> None:
    """Also those that left the session: orphans become children of the subreaper."""
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for name in os.listdir("/proc"):
            if name.isdigit() and _parent(name) == os.getpid():
                os.kill(int(name), signal.SIGKILL)
        time.sleep(0.001)


def _parent(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _run(job: dict, key_out: int, score_in: int) -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    score: list[float] = []
    has_key, has_score = _thread.allocate_lock(), _thread.allocate_lock()
    has_key.acquire()
    has_score.acquire()
    _thread.start_new_thread(_report, (key_out, score_in, score, has_key, has_score))
    has_key.acquire()
    _limit(job["timeout_s"], job["memory_mib"])
    score.append(_tested(**{k: job[k] for k in ("code", "tests", "entry_point", "partial")}))
    has_score.release()
    has_key.acquire()  # for ever: the thread ends the process


def _report(
    key_out: int,
    score_in: int,
    score: list[float],
    has_key: _thread.LockType,
    has_score: _thread.LockType,
) -> None:
    write, leave = os.write, os._exit
    key = os.read(key_out, 64)
    os.close(key_out)
    has_key.release()
    has_score.acquire()
    write(score_in, key + b" " + str(score[0]).encode())
    leave(0)


def _limit(timeout_s: float, memory_mib: int) -> None:
    seconds = int(timeout_s) + 1
    for what, most in (
        (resource.RLIMIT_AS, memory_mib << 20),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, FILE_MIB << 20),
        (resource.RLIMIT_NOFILE, FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),  # the kernel exempts root
    ):
        resource.setrlimit(what, (most, most))


def _tested(code: str, tests: list[str], entry_point: str | None, partial: bool) -> float:
    trees = [seen_plainly(ast.parse(test)) for test in tests]
    _import_what_is_named(trees)
    solution = types.ModuleType("solution")
    # Known by its name, for dataclasses look it up; and __main__ is not to lead to this file.
    sys.modules["solution"] = sys.modules["__main__"] = solution
    modules = [
        (name, module, dict(vars(module)))
        for name, module in sys.modules.items()
        if isinstance(module, types.ModuleType) and module is not solution
    ]
    own_builtins = dict(vars(builtins))
    known = set(all_classes())
    _guard(os.getcwd())
    try:
        exec(compile(code, "solution.py", "exec"), vars(solution))
    except BaseException:  # SystemExit and whatever else the code comes up with
        return 0.0
    # A name of the builtins that the code took over may only be the function under test.
    names = {k: v for k, v in vars(solution).items() if k not in own_builtins or k == entry_point}
    held, failed = set(), set()
    scope = {**names, "__builtins__": own_builtins, "__held__": held, "__failed__": failed}
    scope |= helpers(scope, known, trees)
    total = 0
    for tree in trees:
        first = total
        total = _note_asserts(tree, first) if partial else first
        if total == first:  # all or nothing, or no assert in it: it holds if it ends
            total += 1
            tree.body += ast.parse(f"__held__.add({first})").body
        _put_back(modules)
        try:
            exec(compile(tree, "tests.py", "exec"), scope)
        except BaseException:
            continue
    _put_back(modules)
    share = len(held - failed) / total
    return share if partial else float(share == 1)


def _import_what_is_named(trees: list[ast.Module]) -> None:
    """The modules of the tests, before the code can change them."""
    for name in PLAIN_MODULES:
        importlib.import_module(name)
    for node in (n for tree in trees for n in ast.walk(tree)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            try:
                importlib.import_module(name)
            except Exception:  # the test itself will say so
                continue


def _put_back(modules: list[tuple[str, types.ModuleType, dict]]) -> None:
    for name, module, content in modules:
        sys.modules[name] = module
        vars(module).update(content)


def _note_asserts(tree: ast.Module, first: int) -> int:
    """Each assert, numbered from `first` on, notes whether it held; returns the next number."""

    class Noting(ast.NodeTransformer):
        number = first

        def visit_Assert(self, node: ast.Assert) -> ast.Try:
            noting = ast.parse(ASSERT.format(self.number)).body[0]
            noting.body = [node]
            self.number += 1
            return ast.copy_location(noting, node)

    noting = Noting()
    ast.fix_missing_locations(noting.visit(tree))
    return noting.number


def _guard(root: str) -> None:
    """An audit hook, which can't be removed, against processes, sockets, writes outside `root`."""
    root = os.path.realpath(root)
    real, join, null = os.path.realpath, os.path.join, os.devnull

    def path_of(path: object, folder: object) -> str:
        base = real(f"/proc/self/fd/{folder}") if isinstance(folder, int) and folder >= 0 else ""
        return real(join(base, os.fsdecode(path)))

    def inside(path: str) -> bool:
        return path == root or path.startswith(root + os.sep)

    asking = [False]
    frame_of = sys._getframe

    def by_the_library() -> bool:
        asking[0] = True
        try:
            return frame_of(2).f_code.co_filename.startswith(LIBRARY)
        finally:
            asking[0] = False

    def hook(event: str, args: tuple) -> None:
        if asking[0] and event in ("sys._getframe", "object.__getattr__"):
            return
        if event == "object.__getattr__" and args[1] in FRAMES and not by_the_library():
            raise Refused(f"{args[1]} is refused here")
        unix = event == "socket.__new__" and args[1] == 1  # asyncio wakes itself by one
        if event in REFUSED or event.startswith("ctypes."):
            raise Refused(f"{event} is refused here")
        if event.startswith("socket.") and not unix:
            raise Refused(f"{event} is refused here")
        if event == "open":
            check_open(*args)
        if event in CHANGES:
            folder = None if event == "os.truncate" else args[-1]
            for path in args:
                if isinstance(path, str | bytes | os.PathLike) and not inside(
                    path_of(path, folder)
                ):
                    raise Refused(f"{event} outside the working folder is refused here")

    def check_open(path: object, _mode: object, flags: int) -> None:
        if isinstance(path, int):
            raise Refused("opening a descriptor is refused here")
        target = path_of(path, None)
        if target.startswith("/proc") or (flags & WRITES and not inside(target) and target != null):
            raise Refused(f"opening {target} is refused here")

    sys.addaudithook(hook)


if __name__ == "__main__":
    supervise()
