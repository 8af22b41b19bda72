"""The networks of `torch_train.py`: PyTorch's basic MNIST CNN, the CIFAR ResNet-18 of the distributed-training guide,
and MobileNetV2 (the network of crates/phalanx-nn/tests/fixtures/make_mobilenet.py, which needs no torchvision)."""
import pathlib

import torch
import torch.nn as nn
import torch.nn.functional as F


class Mnist(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(self.dropout1(x), 1)
        return self.fc2(self.dropout2(F.relu(self.fc1(x))))


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.residual_function = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return F.relu(self.residual_function(x) + self.shortcut(x), inplace=True)


class ResNet18(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
        inputs = 64
        for outputs, first in ((64, 1), (128, 2), (256, 2), (512, 2)):
            for stride in (first, 1):
                layers.append(Block(inputs, outputs, stride))
                inputs = outputs
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.dense_layer = nn.Linear(512, 10)

    def forward(self, x):
        return self.dense_layer(self.features(x))


def mobilenetv2():
    fixture = pathlib.Path(__file__).parents[3] / "crates/phalanx-nn/tests/fixtures/make_mobilenet.py"
    names = {"__file__": str(fixture)}
    exec(fixture.read_text().split("\nwant, initial, net = run(")[0], names)  # its classes, not its run
    net = names["MobileNetV2"](10)
    net.classifier[0].p = 0.2
    return net


# Name, then what builds the network and the shape of one of its images.
MODELS = {"mnist": (Mnist, (1, 28, 28)), "resnet18": (ResNet18, (3, 32, 32)), "mobilenetv2": (mobilenetv2, (3, 32, 32))}
