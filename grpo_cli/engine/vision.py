"""What prepares the images of a run's datasets, if they have some."""

from pathlib import Path

from datasets import Dataset, IterableDataset

from grpo_cli.data.image_columns import has_images, overlooked_images
from grpo_cli.errors import DataError
from grpo_cli.policy.load import load_config
from grpo_cli.policy.load_vision import load_vision
from grpo_cli.recipe.overlooked_images import overlooked_line
from grpo_cli.recipe.schema import DatasetSection, ModelSection
from grpo_cli.vision.inputs import is_vision_language
from grpo_cli.vision.processor import VisionProcessor


class VisionLoader:
    """Loads the recipe's image processor when the first dataset with images comes: text alone needs no packages for images.

    Args:
        section: The recipe's `model:`.
        folder: The recipe's folder.

    Attributes:
        loaded: The processor; None: no dataset so far has images.
    """

    def __init__(self, section: ModelSection, *, folder: Path) -> None:
        self.loaded: VisionProcessor | None = None
        self._section = section
        self._folder = folder

    def of(self, rows: Dataset | IterableDataset) -> VisionProcessor | None:
        """Give what prepares the images of a dataset; None: it has none.

        Raises:
            DataError: If it has images, but the model reads text only.
            ModelError: As `load_vision` does.
        """
        if not has_images(rows):
            return None
        self.loaded = self.loaded or load_vision(self._section, folder=self._folder)
        if self.loaded is None:
            raise DataError(
                f"dataset: it has images, but {self._section.name_or_path} is a model that reads text only",
                hint="name a vision-language model in model.name_or_path, or give the column another name in dataset.columns, "
                "such as `{picture: image}`",
            )
        return self.loaded

    def overlooked(
        self, rows: Dataset | IterableDataset, section: DatasetSection, *, key: str = "dataset"
    ) -> list[str]:
        """Give a line about images of a dataset that no prompt shows, though the model could see them.

        Args:
            rows: With columns as the recipe calls them.
            section: What it says of them.
            key: Where it says so.
        """
        if not is_vision_language(load_config(self._section, self._folder)):
            return []
        line = overlooked_line(key, section, overlooked_images(rows))
        return [] if line is None else [line]
