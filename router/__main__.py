"""`python -m gpupool.router`: started by the supervisor, never by hand."""

from __future__ import annotations

import gc
import resource
import sys

from gpupool import child, logs
from gpupool.spec import router_spec
from gpupool.stack_dump import StackDump

from .loop import Router


def main() -> int:
    """Take up what was inherited, and serve."""
    given = child.attach()
    spec = router_spec(given.spec)
    StackDump(spec.stacks_file)
    log = logs.configure("router", spec.log)
    # A connection costs a descriptor; the soft limit is usually the one meant for programs that use select().
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    router = Router(spec, given.board, given.channel, log)
    gc.collect()
    gc.freeze()  # what lives for ever need not be looked at again and again
    code = router.run()
    log.close()
    return code


sys.exit(main())
