"""Longshore's Python client under a name that nothing else takes: `import longshore; longshore.load("s3://...")`.

Anybody may have a folder or a file that is called `storage`, `cluster` or `actors`. So this package looks where they
come from (`longshore.installation`) before it imports them, and needs only the standard library itself. It offers
every public name of `cluster`, loaded when it is first used (PEP 562).
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from longshore.installation import PackageShadowed as PackageShadowed
from longshore.installation import __version__ as __version__
from longshore.installation import check_packages

if TYPE_CHECKING:
    from cluster import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        if name != "__all__" and (name.startswith("_") or importlib.util.find_spec(f"longshore.{name}")):
            raise AttributeError(f"module 'longshore' has no attribute {name!r}")  # or a submodule, imported next
        check_packages()
        import cluster

        if name not in ("__all__", *cluster.__all__):
            raise AttributeError(f"module 'longshore' has no attribute {name!r}")
        globals()[name] = value = getattr(cluster, name)  # the next use does not come through here
        return value

    def __dir__() -> list[str]:
        check_packages()
        import cluster

        return sorted({*globals(), *cluster.__all__})
