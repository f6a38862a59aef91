"""vLLM's server, too, from a process that has imported it already; see `warm_start`.

Real servers all the same: started, watched and ended by the real supervisor, with an engine in a process of its own. Where users start
one, all of them import vLLM anew, for twenty seconds of processor time; `test_served_vllm` has servers that are started like that.
"""

from warm_start import GRPO, MODULES

SERVER_MODULES = (
    *MODULES,
    *(
        "grpo_cli.rollout.vllm.supervisor",
        "grpo_cli.rollout.vllm.served_process",
        "grpo_cli.rollout.vllm.served_images",
    ),
    *("vllm.entrypoints.cli.serve", "vllm.entrypoints.openai.api_server"),
    *("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.llama"),
)
"""What is imported beforehand."""
SERVER_NAME = "vllm server"
"""Of its process; vLLM itself names that of its engine."""
_SERVED = """
import multiprocessing, os, signal, sys
from vllm.v1.engine import utils
from grpo_cli.parent_death import signal_at_parents_death
from grpo_cli.rollout.vllm import served_process

del sys.path[0]  # as -P has it
# Where the engine is started anew, it is told so by its import of the served process.
os.register_at_fork(after_in_child=lambda: signal_at_parents_death(signal.SIGKILL))
utils.get_mp_context = lambda: multiprocessing.get_context("fork")
served_process.main(sys.argv[1:])
"""
SERVE = f"""
import subprocess, sys
from types import SimpleNamespace
from grpo_cli.rollout.vllm import supervisor

def start(command, *, env, stdout, **_):
    served = [sys.executable, "-P", "-m", "grpo_cli.rollout.vllm.served_process"]
    assert command[:4] == served, command
    return spares.pop(0).become(command[4:], env, name={SERVER_NAME!r}, program={_SERVED!r}, output=stdout.fileno())

supervisor.subprocess = SimpleNamespace(**vars(subprocess) | {{"Popen": start}})
{GRPO}
"""
"""`grpo` that starts servers, as many as it has spare processes."""
