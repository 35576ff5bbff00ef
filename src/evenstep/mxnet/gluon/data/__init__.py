"""Data sets of Gluon, and the loader that makes batches of them."""

from evenstep.mxnet.gluon.data import transforms, vision
from evenstep.mxnet.gluon.data.dataset import ArrayDataset, Dataset, SimpleDataset
from evenstep.mxnet.gluon.data.loader import DataLoader

__all__ = ["ArrayDataset", "DataLoader", "Dataset", "SimpleDataset", "transforms", "vision"]
