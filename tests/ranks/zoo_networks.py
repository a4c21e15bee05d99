"""Small networks of the usual kinds, written as their authors write them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_modules import CLASSES, WIDTH


def mlp() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


class ResidualBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """Batch normalisation, so that running statistics must be those of the microbatches in order."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )
        self.layer1 = nn.Sequential(ResidualBlock(8, 8, 1), ResidualBlock(8, 8, 1))
        self.layer2 = nn.Sequential(ResidualBlock(8, 16, 2), ResidualBlock(16, 16, 1))
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.stem(x)))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class DropoutOnChannelsLast(nn.Module):
    """A dropout mask is filled in the order of memory, which here is not that of the dims."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(8 if number else 3, 8, 3, padding=1) for number in range(6))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.dropout(block(x).relu(), 0.2, self.training)
        return self.head(x.mean((2, 3)))


class UNet3d(nn.Module):
    """Long skips: what the first stages compute is needed by the last ones."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._double(1, 4), self._double(4, 8)])
        self.middle = self._double(8, 16)
        self.up = nn.ModuleList([nn.ConvTranspose3d(16, 8, 2, 2), nn.ConvTranspose3d(8, 4, 2, 2)])
        self.merge = nn.ModuleList([self._double(16, 8), self._double(8, 4)])
        self.out = nn.Conv3d(4, CLASSES, 1)

    @staticmethod
    def _double(channels_in: int, channels: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv3d(channels_in, channels, 3, padding=1),
            nn.GroupNorm(2, channels),
            nn.ReLU(),
            nn.Conv3d(channels, channels, 3, padding=1),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool3d(x, 2)
        x = self.middle(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return self.out(x)


class Encoder(nn.Module):
    """PyTorch's own transformer, with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=padding))


class Recurrent(nn.Module):
    """Layers that hand on their state as well as their output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for layer in self.layers:
            x, state = layer(x, state)
        return self.head(x) + self.head(state[0].transpose(0, 1))
