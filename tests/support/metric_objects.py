"""Objects of torchmetrics, and what `evaluate` gives for them."""

import warnings

import torch
from torch.utils.data import TensorDataset

import evenstep
from trainers import open_trainer
from zoo import CLASSES, build, make_batches

BATCHES = make_batches((24, 17, 24))
LOADER = evenstep.data.Loader(TensorDataset(*make_batches([30])[0]), 9)  # its parts are fetched


def metrics():
    from torchmetrics import classification

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of much memory
        return {
            "accuracy": classification.MulticlassAccuracy(CLASSES),
            "f1": classification.MulticlassF1Score(CLASSES),
            "confusion": classification.MulticlassConfusionMatrix(CLASSES),
            "auroc": classification.MulticlassAUROC(CLASSES, thresholds=None),
            "shifted": classification.MulticlassConfusionMatrix(CLASSES) + 1,
            "calibration": classification.MulticlassCalibrationError(CLASSES),
        }


def collection():
    from torchmetrics import MetricCollection, classification

    return MetricCollection(
        [classification.MulticlassAccuracy(CLASSES), classification.MulticlassF1Score(CLASSES)]
    )


def evaluated(devices, batches=BATCHES, **options):
    """Return the metrics of a model, on some devices."""
    with open_trainer(build("convolution"), devices=devices, **options) as trainer:
        return trainer.evaluate(batches, metrics())


def plainly(found):
    return {name: torch.as_tensor(value).tolist() for name, value in found.items()}
