"""A convolutional network with DataLoader workers, evaluation in the middle, and a checkpoint at the end."""

import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def block(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(), nn.MaxPool2d(2))


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(block(3, 64), block(64, 128), block(128, 256), nn.Flatten(), nn.Linear(256 * 64, 100)).cuda()
    images = TensorDataset(torch.rand(320, 3, 64, 64), torch.randint(100, (320,)))
    loader = DataLoader(images, batch_size=32, num_workers=2, pin_memory=True)
    wide = DataLoader(images, batch_size=160)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    for _ in range(2):
        model.train()
        begin = time.perf_counter()
        for batch, labels in loader:
            loss = criterion(model(batch.cuda(non_blocking=True)), labels.cuda(non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch.cuda.synchronize()
            print("STEP", time.perf_counter() - begin)
            begin = time.perf_counter()
        model.eval()
        with torch.no_grad():
            for batch, labels in wide:
                criterion(model(batch.cuda()), labels.cuda())
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, Path(folder) / "model.pt")
    print("PEAK", torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    main()
