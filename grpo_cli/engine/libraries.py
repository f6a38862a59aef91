"""The libraries that models, data and training come from, kept out of the console."""

import logging

from datasets import disable_progress_bars
from transformers.utils import logging as transformers_logging


def quiet_libraries() -> None:
    """Keep progress bars and notices of libraries out of the console; their errors still come as exceptions."""
    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
