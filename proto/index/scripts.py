"""The Lua scripts that work on the prefix index inside Redis, one for each operation of RedisPrefixIndex.

Owns the list of scripts and how their texts are put together. The scripts lie in lua/, and own atomicity and every rule
about berths and leases. Does not own the layout (schema.py).
"""

import re
from importlib.resources import files

_FOLDER = files(__package__) / "lua"
_INCLUDE = re.compile(r"^-- include (\w+)\n", re.MULTILINE)


def _read(name: str) -> str:
    """Return the text of lua/NAME.lua, with each line `-- include OTHER` replaced by lua/OTHER.lua."""
    text = (_FOLDER / f"{name}.lua").read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda include: _read(include[1]), text)


REGISTER = _read("register")
RENEW = _read("renew")
RETIRE = _read("retire")
CLAIM = _read("claim")
UNCLAIM = _read("unclaim")
APPLY = _read("apply")
LOOKUP = _read("lookup")
DIRECTORY = _read("directory")
PURGE = _read("purge")
INFO = _read("info")
ALL = (REGISTER, APPLY, RENEW, RETIRE, CLAIM, UNCLAIM, LOOKUP, DIRECTORY, PURGE, INFO)
"""All scripts. A client loads them at once."""
