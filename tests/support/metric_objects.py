"""Objects of torchmetrics, and what `evaluate` gives for them."""

import warnings

from trainers import open_trainer
from zoo import CLASSES, build, make_batches

BATCHES = make_batches((24, 17, 24))


def metrics():
    from torchmetrics import classification

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of much memory
        return {
            "accuracy": classification.MulticlassAccuracy(CLASSES),
            "f1": classification.MulticlassF1Score(CLASSES),
            "confusion": classification.MulticlassConfusionMatrix(CLASSES),
            "auroc": classification.MulticlassAUROC(CLASSES, thresholds=None),
            "calibration": classification.MulticlassCalibrationError(CLASSES),
        }


def collection():
    from torchmetrics import MetricCollection, classification

    return MetricCollection(
        [classification.MulticlassAccuracy(CLASSES), classification.MulticlassF1Score(CLASSES)]
    )


def evaluated(devices, **options):
    """Return the metrics of a model, on some devices."""
    with open_trainer(build("convolution"), devices=devices, **options) as trainer:
        return trainer.evaluate(BATCHES, metrics())
