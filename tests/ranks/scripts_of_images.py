"""Scripts after pytorch/examples that train on images, on small synthetic data: see `scripts_kit`."""

from scripts_kit import Script

__all__ = ["SCRIPTS_OF_IMAGES"]

_MNIST = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import shardwright.torch as sw                                                          #+
sw.init(SETTINGS)                                                                       #+

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
        self.fc1, self.fc2 = nn.Linear(8 * 4 * 4, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return F.log_softmax(self.fc2(F.relu(self.fc1(torch.flatten(x, 1)))), dim=1)

data = TensorDataset(torch.randn(32, 1, 12, 12), torch.arange(32) % 10)
loader = DataLoader(data, 8)                                                            #-
loader = sw.data_loader(data, 8, shuffle=False)                                         #+
model = Net()                                                                           #-
model = sw.DistributedModel(Net())                                                      #+
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

@sw.step                                                                                #+
def train_step(model, data, target):                                                    #+
    loss = F.nll_loss(model(data), target)                                              #+
    loss.backward()                                                                     #+
    return loss                                                                         #+

@sw.step                                                                                #+
def test_step(model, data, target):                                                     #+
    return F.nll_loss(model(data), target, reduction="sum")                             #+

for epoch in range(2):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)                                          #-
        loss.backward()                                                                 #-
        loss = train_step(model, data, target).reduce_mean()                            #+
        optimizer.step()
        told(loss)
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for data, target in loader:
            test_loss += F.nll_loss(model(data), target, reduction="sum").item()        #-
            test_loss += test_step(model, data, target).reduce_mean().item()            #+
    told(test_loss / len(loader.dataset))                                               #-
    told(test_loss / 32 * sw.rdp_size())                                                #+
    scheduler.step()
"""

_RESNET = """
import torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
import shardwright.torch as sw                                                          #+
sw.init(SETTINGS)                                                                       #+

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))

data = TensorDataset(torch.randn(16, 3, 8, 8), torch.arange(16) % 5)
train_loader = DataLoader(data, batch_size=8)
end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
model = nn.Sequential(nn.Conv2d(3, 8, 3), Block(8), Block(8), *end)
model = sw.DistributedModel(model)                                                      #+
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)

@sw.step                                                                                #+
def train_step(model, images, target):                                                  #+
    output = model(images)                                                              #+
    loss = criterion(output, target)                                                    #+
    loss.backward()                                                                     #+
    return loss, output                                                                 #+

for epoch in range(2):
    model.train()
    for images, target in train_loader:
        optimizer.zero_grad()
        output = model(images)                                                          #-
        loss = criterion(output, target)                                                #-
        loss.backward()                                                                 #-
        loss, output = train_step(model, images, target)                                #+
        optimizer.step()
        told(loss)                                                                      #-
        told((output.argmax(1) == target).float().sum())                                #-
        told(loss.reduce_mean())                                                        #+
        told((output.concat().argmax(1) == target).float().sum())                       #+
"""

_VAE = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader
import shardwright.torch as sw                                                          #+
sw.init(SETTINGS)                                                                       #+

class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(20, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.fc3, self.fc4 = nn.Linear(4, 16), nn.Linear(16, 20)

    def forward(self, x, noise):
        h = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + noise * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar

def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x, reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD

data = [(torch.rand(20), torch.randn(4)) for _ in range(32)]
loader = DataLoader(data, 8)                                                            #-
loader = sw.data_loader(data, 8, shuffle=False)                                         #+
model = VAE()                                                                           #-
model = sw.DistributedModel(VAE())                                                      #+
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

@sw.step                                                                                #+
def run(model, x, noise):                                                               #+
    recon, mu, logvar = model(x, noise)                                                 #+
    loss = loss_function(recon, x, mu, logvar)                                          #+
    if model.training:                                                                  #+
        loss.backward()                                                                 #+
    return loss                                                                         #+

for epoch in range(2):
    model.train()
    for x, noise in loader:
        optimizer.zero_grad()
        recon, mu, logvar = model(x, noise)                                             #-
        loss = loss_function(recon, x, mu, logvar)                                      #-
        loss.backward()                                                                 #-
        loss = run(model, x, noise).reduce_mean()                                       #+
        told(loss)
        optimizer.step()
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for x, noise in loader:
            recon, mu, logvar = model(x, noise)                                         #-
            test_loss += loss_function(recon, x, mu, logvar).item()                     #-
            test_loss += run(model, x, noise).reduce_mean().item()                      #+
    told(test_loss)
"""

_DCGAN = """
import torch, torch.nn as nn
import shardwright.torch as sw                                                          #+
sw.init(SETTINGS)                                                                       #+

def conv(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 4, 2, 1), nn.LeakyReLU(0.2))

def deconv(a, b):
    return nn.Sequential(nn.ConvTranspose2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.ReLU())

class Both(nn.Module):                                                                  #+
    def __init__(self):                                                                 #+
        super().__init__()                                                              #+
        self.G, self.D = netG, netD                                                     #+
netG = nn.Sequential(deconv(6, 8), deconv(8, 8), nn.Conv2d(8, 3, 1), nn.Tanh())
netD = nn.Sequential(conv(3, 8), conv(8, 8), nn.Flatten(), nn.Linear(8 * 4, 1), nn.Sigmoid())
model = sw.DistributedModel(Both())                                                     #+
criterion = nn.BCELoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))

@sw.step                                                                                #+
def of_D(model, real, noise):                                                           #+
    out, fake = netD(real), netG(noise)                                                 #+
    loss = criterion(out, torch.ones_like(out))                                         #+
    out = netD(fake.detach())                                                           #+
    loss = loss + criterion(out, torch.zeros_like(out))                                 #+
    loss.backward()                                                                     #+
    return loss, fake                                                                   #+

@sw.step                                                                                #+
def of_G(model, noise):                                                                 #+
    out = netD(netG(noise))                                                             #+
    loss = criterion(out, torch.ones_like(out))                                         #+
    loss.backward()                                                                     #+
    return loss                                                                         #+

for i in range(3):
    real, noise = torch.rand(8, 3, 8, 8), torch.randn(8, 6, 2, 2)
    netD.zero_grad()
    output = netD(real)                                                                 #-
    errD_real = criterion(output, torch.ones_like(output))                              #-
    errD_real.backward()                                                                #-
    fake = netG(noise)                                                                  #-
    output = netD(fake.detach())                                                        #-
    errD_fake = criterion(output, torch.zeros_like(output))                             #-
    errD_fake.backward()                                                                #-
    told(errD_real + errD_fake)                                                         #-
    errD, fake = of_D(model, real, noise)                                               #+
    told(errD.reduce_mean())                                                            #+
    optimizerD.step()
    netG.zero_grad()
    output = netD(netG(noise))                                                          #-
    errG = criterion(output, torch.ones_like(output))                                   #-
    errG.backward()                                                                     #-
    errG = of_G(model, noise).reduce_mean()                                             #+
    optimizerG.step()
    told(errG)
"""


_FORWARD_FORWARD = """
import torch, torch.nn as nn, torch.nn.functional as F
import shardwright.torch as sw                                                          #+
sw.init(SETTINGS)                                                                       #+

class Layer(nn.Linear):
    def forward(self, x):
        return F.relu(super().forward(x / (x.norm(2, 1, keepdim=True) + 1e-4)))

def layer_loss(good, bad):
    both = torch.cat([2 - good.pow(2).mean(1), bad.pow(2).mean(1) - 2])
    return torch.log(1 + torch.exp(both)).mean()

model = nn.Sequential(Layer(12, 16), Layer(16, 16), Layer(16, 16))
layers = list(model)
model = sw.DistributedModel(model)                                                      #+
opts = [torch.optim.Adam(layer.parameters(), lr=0.03) for layer in layers]

def losses(x_pos, x_neg):
    for layer in layers:
        x_pos, x_neg = layer(x_pos), layer(x_neg)
        yield layer_loss(x_pos, x_neg)
        x_pos, x_neg = x_pos.detach(), x_neg.detach()

@sw.step                                                                                #+
def train_step(model, x_pos, x_neg):                                                    #+
    loss = sum(losses(x_pos, x_neg))                                                    #+
    loss.backward()                                                                     #+
    return loss                                                                         #+

x_pos, x_neg = torch.randn(16, 12), torch.randn(16, 12)
for epoch in range(3):
    for opt in opts:
        opt.zero_grad()
    total = 0                                                                           #-
    for loss in losses(x_pos, x_neg):                                                   #-
        loss.backward()                                                                 #-
        total += loss.item()                                                            #-
    total = train_step(model, x_pos, x_neg).reduce_mean()                               #+
    for opt in opts:
        opt.step()
    told(total)
"""


_SUPER_RESOLUTION = """
import torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
import shardwright.torch as sw                                                          #+
sw.init(SETTINGS)                                                                       #+

class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 5, 1, 2), nn.Conv2d(8, 8, 3, 1, 1)
        self.conv3 = nn.Conv2d(8, upscale_factor**2, 3, 1, 1)
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        nn.init.orthogonal_(self.conv1.weight, nn.init.calculate_gain("relu"))

    def forward(self, x):
        return self.pixel_shuffle(self.conv3(self.relu(self.conv2(self.relu(self.conv1(x))))))

data = TensorDataset(torch.rand(24, 1, 6, 6), torch.rand(24, 1, 12, 12))
loader = DataLoader(data, 10)                                                           #-
loader = sw.data_loader(data, 10, shuffle=False, drop_last=False)                       #+
model = Net(2)                                                                          #-
model = sw.DistributedModel(Net(2))                                                     #+
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

@sw.step                                                                                #+
def train_step(model, input, target):                                                   #+
    loss = criterion(model(input), target)                                              #+
    loss.backward()                                                                     #+
    return loss                                                                         #+

for epoch in range(2):
    for input, target in loader:
        optimizer.zero_grad()
        loss = criterion(model(input), target)                                          #-
        loss.backward()                                                                 #-
        loss = train_step(model, input, target).reduce_mean()                           #+
        optimizer.step()
        told(loss)
"""

SCRIPTS_OF_IMAGES: dict[str, Script] = {
    "super_resolution": Script(_SUPER_RESOLUTION, microbatches=2),
    "mnist": Script(_MNIST),
    "imagenet": Script(_RESNET, microbatches=1, replicates=False),
    "vae": Script(_VAE, is_sum=True),
    "dcgan": Script(_DCGAN, microbatches=1, replicates=False),
    "forward_forward": Script(_FORWARD_FORWARD, replicates=False),
}
