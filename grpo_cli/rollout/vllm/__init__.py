"""vLLM as the rollout engine: in a server of its own (`server_engine`) or in the training processes (`colocate`).

`loading`, `weight_transfer` and `worker_extension` run inside vLLM's processes and import it; nothing else does before an engine
is made.
"""
