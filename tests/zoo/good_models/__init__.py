"""Models as public tutorials and papers build them, each with its loss, batches and optimizer."""

from good_models.generative import GENERATIVE
from good_models.hugging_face import HUGGING_FACE
from good_models.layers import LAYERS
from good_models.objectives import OBJECTIVES
from good_models.sequences import SEQUENCES
from good_models.shared_memory import SHARED_MEMORY
from good_models.vision import VISION

__all__ = ["HUGGING_FACE", "MODELS"]

MODELS = VISION | SEQUENCES | GENERATIVE | OBJECTIVES | LAYERS | SHARED_MEMORY
