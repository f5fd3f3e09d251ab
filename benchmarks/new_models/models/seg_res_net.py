"""SegResNet of MONAI: slices are mirrored and made noisy by MONAI's transforms, seeded by torch's
generator.
"""

import torch
from made_up import Samples
from monai.losses import DiceFocalLoss
from monai.networks.nets import SegResNet
from monai.optimizers import Novograd, WarmupCosineSchedule
from monai.transforms import Compose, RandFlipd, RandGaussianNoised, RandScaleIntensityd
from torch.utils.data import Dataset

SIZE, CLASSES = 32, 3


def build_model():
    return SegResNet(
        spatial_dims=2, init_filters=8, in_channels=1, out_channels=CLASSES,
        blocks_down=(1, 1, 1), blocks_up=(1, 1),
    )  # fmt: skip


def slice_of(generator):
    labels = torch.randint(0, CLASSES, (1, SIZE, SIZE), generator=generator)
    image = torch.randn(1, SIZE, SIZE, generator=generator) + labels
    return {"image": image, "label": labels}


class Augmented(Dataset):
    def __init__(self):
        self._slices = Samples(slice_of, 40)
        self._augment = Compose(
            [
                RandFlipd(["image", "label"], prob=0.5, spatial_axis=0),
                RandScaleIntensityd("image", factors=0.1, prob=1.0),
                RandGaussianNoised("image", prob=0.5, std=0.1),
            ]
        )

    def __len__(self):
        return len(self._slices)

    def __getitem__(self, index):
        # MONAI's transforms have a generator of their own, which a process that reads other items
        # moves otherwise.
        self._augment.set_random_state(seed=int(torch.randint(2**31, ())))
        found = self._augment(self._slices[index])
        image, label = (torch.as_tensor(found[key]) for key in ("image", "label"))
        return image.as_tensor(), label.as_tensor()


def example_batch(batch_size):
    shape = (batch_size, 1, SIZE, SIZE)
    return torch.randn(shape), torch.randint(0, CLASSES, shape)


def dataset():
    return Augmented()


def loss(output, target):
    return DiceFocalLoss(to_onehot_y=True, softmax=True)(output, target)


def optimizer(parameters):
    return Novograd(parameters, lr=1e-2, weight_decay=1e-5)


def scheduler(optimizer):
    return WarmupCosineSchedule(optimizer, warmup_steps=2, t_total=8)
