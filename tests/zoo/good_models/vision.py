"""Images: classified, segmented, searched for objects."""

import torch
import torch.nn.functional as F
from torch import nn

from good_models.recipe import ADAM, ADAMW, SGD, Recipe, images, mlp, summed

CROSS_ENTROPY = nn.CrossEntropyLoss()


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 4, 5, padding=2), nn.Sigmoid(), nn.AvgPool2d(2),
        nn.Conv2d(4, 6, 3), nn.Sigmoid(), nn.Flatten(),
        nn.Linear(24, 12), nn.Sigmoid(), nn.Linear(12, 5),
    )  # fmt: skip


def conv_bn(ins, outs, size=3, stride=1, groups=1, activation=nn.ReLU):
    return nn.Sequential(
        nn.Conv2d(ins, outs, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outs),
        activation(),
    )


def pooled(*layers, width, classes=5):
    """Return layers with global average pooling and a linear classifier after them."""
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))
    return nn.Sequential(*layers, *head)


class Residual(nn.Module):
    """x + body(x), with a shortcut of its own where the shape changes."""

    def __init__(self, body, shortcut=None):
        super().__init__()
        self.body, self.shortcut = body, shortcut or nn.Identity()

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet():
    def block(ins, outs, stride):
        body = nn.Sequential(
            conv_bn(ins, outs, stride=stride), conv_bn(outs, outs, activation=nn.Identity)
        )
        changes = ins != outs or stride != 1
        return Residual(body, conv_bn(ins, outs, 1, stride, 1, nn.Identity) if changes else None)

    return pooled(conv_bn(3, 4), block(4, 4, 1), block(4, 8, 2), width=8)


class StochasticDepth(nn.Module):
    """A residual branch that is left out for some examples in training."""

    def __init__(self, body, survival):
        super().__init__()
        self.body, self.survival = body, survival

    def forward(self, x):
        if not self.training:
            return x + self.body(x)
        survives = torch.rand(len(x), 1, 1, 1, device=x.device) < self.survival
        return x + self.body(x) * survives / self.survival


def stochastic_depth():
    body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())
    return pooled(nn.Conv2d(1, 4, 3), StochasticDepth(body, 0.7), width=4)


def normalised(make_norm):
    return lambda: pooled(
        nn.Conv2d(1, 8, 3), make_norm(), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GELU(), width=8
    )


class ConvNeXtBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.mlp = nn.LayerNorm(width), mlp(width, 2 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-2))

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.mlp(y)).permute(0, 3, 1, 2)


class UNet(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.outer, self.inner = conv_bn(1, 4), conv_bn(4, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.merge, self.head = conv_bn(8, 4), nn.Conv2d(4, classes, 1)

    def forward(self, x):
        outer = self.outer(x)
        inner = self.inner(F.max_pool2d(outer, 2))
        return self.head(self.merge(torch.cat([outer, self.up(inner)], 1)))


def segmented_images(n):
    masks = torch.randint(3, (n, 8, 8))
    return torch.randn(n, 1, 8, 8), masks.masked_fill(torch.rand(n, 8, 8) < 0.1, 255)


def dice(model, X, masks):
    """Dice loss of each image, beside cross entropy (V-Net, 2016)."""
    log_probabilities = model(X).log_softmax(1)
    wanted = F.one_hot(masks, 3).movedim(-1, 1).float()
    overlap = (log_probabilities.exp() * wanted).sum((2, 3))
    union = log_probabilities.exp().sum((2, 3)) + wanted.sum((2, 3))
    return summed(-(log_probabilities * wanted).mean((1, 2, 3)) + (1 - 2 * overlap / union).mean(1))


class Detector(nn.Module):
    """For each cell of a 4 × 4 grid: class scores, and the offsets of a box."""

    def __init__(self, classes=3):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3, 2, 1), nn.GroupNorm(2, 6), nn.ReLU())
        self.classes, self.boxes = nn.Conv2d(6, classes, 1), nn.Conv2d(6, 4, 1)

    def forward(self, x):
        features = self.body(x)
        return self.classes(features), self.boxes(features)


def focal(model, X, wanted, boxes):
    """Focal loss and box loss over the number of objects (RetinaNet, 2017, section 4)."""
    scores, offsets = model(X)
    hits = wanted.amax(1, keepdim=True)
    cross_entropy = F.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
    miss = torch.where(wanted == 1, 1 - scores.sigmoid(), scores.sigmoid())
    box_loss = F.smooth_l1_loss(offsets, boxes, reduction="none") * hits
    return (miss**2 * cross_entropy).sum() + box_loss.sum(), hits.sum()


def images_with_objects(n):
    wanted = F.one_hot(torch.randint(3, (n, 4, 4)), 3).movedim(-1, 1).float()
    hits = torch.rand(n, 1, 4, 4) < 0.3
    return torch.randn(n, 1, 8, 8), wanted * hits, torch.randn(n, 4, 4, 4)


class PatchEmbedding(nn.Module):
    def __init__(self, width=8, patch=2, size=8):
        super().__init__()
        self.project = nn.Conv2d(1, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)

    def forward(self, x):
        patches = self.project(x).flatten(2).mT
        return torch.cat([self.first.expand(len(x), -1, -1), patches], 1) + self.places


class ViT(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = PatchEmbedding(width)
        layer = nn.TransformerEncoderLayer(
            width, 2, 16, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x))[:, 0])


VISION = {
    "mlp": Recipe(lambda: nn.Sequential(nn.Flatten(), mlp(64, 16, 5)), images(), CROSS_ENTROPY),
    "lenet": Recipe(lenet, images(), CROSS_ENTROPY),
    "resnet": Recipe(resnet, images(3), CROSS_ENTROPY),
    "stochastic depth": Recipe(stochastic_depth, images(), CROSS_ENTROPY),
    "group norm": Recipe(normalised(lambda: nn.GroupNorm(2, 8)), images(), CROSS_ENTROPY),
    "instance norm": Recipe(
        normalised(lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True)), images(),
        CROSS_ENTROPY),
    "batch norm without statistics": Recipe(
        normalised(lambda: nn.BatchNorm2d(8, track_running_stats=False)), images(),
        CROSS_ENTROPY),
    "convnext": Recipe(
        lambda: pooled(nn.Conv2d(1, 6, 2, 2), ConvNeXtBlock(6), ConvNeXtBlock(6), width=6),
        images(), nn.CrossEntropyLoss(label_smoothing=0.1), make_optimizer=ADAMW),
    "unet": Recipe(UNet, segmented_images, nn.CrossEntropyLoss(ignore_index=255)),
    "dice": Recipe(
        UNet, lambda n: (torch.randn(n, 1, 8, 8), torch.randint(3, (n, 8, 8))), objective=dice,
        make_optimizer=ADAM),
    "focal": Recipe(Detector, images_with_objects, objective=focal, make_optimizer=SGD),
    "vit": Recipe(ViT, images(), CROSS_ENTROPY, make_optimizer=ADAMW),
}  # fmt: skip
