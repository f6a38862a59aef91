"""Keep what vLLM does to its process from the training that goes on there.

vLLM is written for a process of its own. In this one it seeds and draws from the global random generators, writes environment
variables that launchers read (LOCAL_WORLD_SIZE) and child processes inherit (LD_PRELOAD), replaces `torch.set_num_threads`, binds
memory to one NUMA node, works on a CUDA stream of its own, and ends the process group of whoever made it.

What it puts in the place of CUDA's functions where there is no CUDA is left there.
"""

import ctypes
import logging
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import distributed

LOG_LEVEL = "VLLM_LOGGING_LEVEL"
"""Where a user says what they want to read of vLLM; this project's choice is errors alone, for the start of an engine warns a
dozen times of what is contained here or cannot be changed."""
_DUMPS = "vllm.logging_utils.dump_input"
"""Logs pages of settings and requests before an error is raised, which are for a user who asked to read of vLLM."""

_MAX_NODES = 1024
"""Bits of the kernel's sets of NUMA nodes."""


class Containment:
    """Runs vLLM's code in this process and puts back what it changed.

    vLLM's environment is there only while its code runs, and is the same every time.
    """

    def __init__(self) -> None:
        self._log_level = os.environ.get(LOG_LEVEL, "ERROR")
        self._dumps_level = "NOTSET" if LOG_LEVEL in os.environ else "CRITICAL"
        self._environment = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this very process
            "VLLM_NO_USAGE_STATS": "1",
            LOG_LEVEL: self._log_level,
        }

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Run what is inside with vLLM's environment and without traces."""
        with ExitStack() as stack:
            stack.enter_context(_own_memory_policy())
            stack.enter_context(_own_torch_settings())
            stack.enter_context(_own_randomness())
            stack.enter_context(_without_autocast())
            stack.enter_context(self._own_environment())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            logging.getLogger("vllm").setLevel(self._log_level.upper())
            logging.getLogger(_DUMPS).setLevel(self._dumps_level)
            yield

    @contextmanager
    def _own_environment(self) -> Iterator[None]:
        """Lend the environment to vLLM, and keep what it made of it for the next time."""
        outside = dict(os.environ)
        os.environ.update(self._environment)
        try:
            yield
        finally:
            inside = dict(os.environ)
            self._environment = {name: value for name, value in inside.items() if outside.get(name) != value}
            for name in inside.keys() - outside.keys():
                del os.environ[name]
            os.environ.update(outside)


@contextmanager
def spared_process_group() -> Iterator[None]:
    """Let vLLM end the process groups it made, but not those of training, if there are any now."""
    end = distributed.destroy_process_group

    def spare(group: Any = None) -> None:
        if group is not None and group is not distributed.group.WORLD:
            end(group)

    distributed.destroy_process_group = spare
    try:
        yield
    finally:
        distributed.destroy_process_group = end


@contextmanager
def _own_randomness() -> Iterator[None]:
    """Put the global random generators back."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002  the global one is meant
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(cpu)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Let vLLM compute in its own precision, whatever the caller's autocast says."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


@contextmanager
def _own_torch_settings() -> Iterator[None]:
    """Put back torch's global settings; on a GPU also the device and the stream, when vLLM's work there is done."""
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    has_gpu = torch.cuda.is_available()
    stream = torch.cuda.current_stream() if has_gpu else None
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        if stream is not None:
            torch.cuda.synchronize()
            torch.cuda.set_stream(stream)


@contextmanager
def _own_memory_policy() -> Iterator[None]:
    """Put back on which NUMA nodes this thread's memory comes to lie: vLLM on CPUs binds it to one node, for good."""
    numa = _libnuma()
    if numa is None:
        yield
        return
    mode, nodes, bits = ctypes.c_int(), (ctypes.c_ulong * (_MAX_NODES // 64))(), ctypes.c_ulong(_MAX_NODES)
    known = numa.get_mempolicy(ctypes.byref(mode), nodes, bits, None, ctypes.c_ulong(0)) == 0
    try:
        yield
    finally:
        if known:
            numa.set_mempolicy(mode, nodes, bits)


@cache
def _libnuma() -> ctypes.CDLL | None:
    """Open the library that vLLM binds memory with; where it is not, vLLM cannot do that either."""
    try:
        return ctypes.CDLL("libnuma.so.1")
    except OSError:
        return None
