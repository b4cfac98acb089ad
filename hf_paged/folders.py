"""Where this package keeps files of its own, and whether it may believe what lies there."""

import os
import stat
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """`$HF_PAGED_CACHE`, else `hf_paged` in the user's cache folder. It may not be there yet.

    Raises:
        RuntimeError: there is no home folder to put it in: no HOME, and a user that the system does not know.
    """
    if chosen := os.environ.get("HF_PAGED_CACHE"):
        return Path(chosen).expanduser()
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user_cache).expanduser() / "hf_paged"


def private_folder(name: str) -> Path:
    """`name-<user id>` in the cache folder, where nobody but us can put anything; made if it is not there.

    For files that are run: whoever can write one of them, or exchange one of the folders above, runs code as us.

    Raises:
        OSError: it cannot be made, or others could put something there. The message says which.
        RuntimeError: as `cache_folder`.
    """
    user = _user()
    folder = cache_folder().resolve()  # from here on no link is followed that somebody may turn elsewhere
    folder /= name if user is None else f"{name}-{user}"
    for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        path.mkdir(mode=0o700, exist_ok=True)  # each of them, whatever the umask; another process may be faster
    for path in folder.parents:
        _check_parent(path)
    check_private(folder, stat.S_ISDIR)
    return folder


def check_private(path: Path, kind: Callable[[int], bool] = stat.S_ISREG) -> None:
    """Raise unless what lies there is ours, and only we can write to it.

    Args:
        kind: what it must be, of `stat`; a link is neither file nor folder.

    Raises:
        OSError: it is not there (FileNotFoundError), or not ours alone (PermissionError).
    """
    there, user = path.lstat(), _user()
    if not kind(there.st_mode):
        raise PermissionError(f"{path} is not a {'regular file' if kind is stat.S_ISREG else 'folder'}")
    if user is None:
        return
    if there.st_uid != user:
        raise PermissionError(f"{path} belongs to user {there.st_uid}, not to {user}")
    if there.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others may write to {path} (mode {stat.S_IMODE(there.st_mode):o})")


def _check_parent(path: Path) -> None:
    """Raise PermissionError if others could exchange what lies in this folder: if it is theirs, or if they may write to
    it and it is not sticky, as /tmp is."""
    there, user = path.lstat(), _user()
    if user is None:
        return
    if there.st_uid not in (0, user):
        raise PermissionError(f"{path} belongs to user {there.st_uid}, not to {user} or root")
    shared = there.st_mode & stat.S_IWOTH or (there.st_mode & stat.S_IWGRP and not _is_our_group(there.st_gid))
    if shared and not there.st_mode & stat.S_ISVTX:
        raise PermissionError(
            f"others may write to {path} (mode {stat.S_IMODE(there.st_mode):o}), and it is not sticky; name another "
            "folder in the environment variable HF_PAGED_CACHE"
        )


def _user() -> int | None:
    """Our user id; None where there are none."""
    return os.getuid() if hasattr(os, "getuid") else None


def _is_our_group(group: int) -> bool:
    """Whether nobody else is in it: many systems give every user a group, and let it write to what the user makes."""
    import grp
    import pwd

    try:
        entry, name = grp.getgrgid(group), pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return False
    return entry.gr_name == name and not set(entry.gr_mem) - {name}
