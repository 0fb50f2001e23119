"""Transfer learning: phases of an epoch, and the best weights in a temporary directory until the end."""

import os
import time
from tempfile import TemporaryDirectory

import torch
import torch.nn as nn
import torch.optim as optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(8)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
datasets = {x: TensorDataset(torch.randn(n, 3, 8, 8), torch.randint(0, 2, (n,))) for x, n in [("train", 60), ("val", 25)]}
dataloaders = {x: DataLoader(datasets[x], batch_size=12, shuffle=True, num_workers=0) for x in ["train", "val"]}
dataset_sizes = {x: len(datasets[x]) for x in ["train", "val"]}


def train_model(model, criterion, optimizer, scheduler, num_epochs=2):
    since = time.time()
    with TemporaryDirectory() as tempdir:
        best_model_params_path = os.path.join(tempdir, "best_model_params.pt")
        torch.save(model.state_dict(), best_model_params_path)
        best_acc = 0.0
        for epoch in range(num_epochs):
            print(f"Epoch {epoch}/{num_epochs - 1}")
            for phase in ["train", "val"]:
                if phase == "train":
                    model.train()
                else:
                    model.eval()
                running_loss = 0.0
                running_corrects = 0
                for inputs, labels in dataloaders[phase]:
                    inputs = inputs.to(device)
                    labels = labels.to(device)
                    optimizer.zero_grad()
                    with torch.set_grad_enabled(phase == "train"):
                        outputs = model(inputs)
                        _, preds = torch.max(outputs, 1)
                        loss = criterion(outputs, labels)
                        if phase == "train":
                            loss.backward()
                            optimizer.step()
                    running_loss += loss.item() * inputs.size(0)
                    running_corrects += torch.sum(preds == labels.data)
                if phase == "train":
                    scheduler.step()
                epoch_loss = running_loss / dataset_sizes[phase]
                epoch_acc = running_corrects.double() / dataset_sizes[phase]
                print(f"{phase} Loss: {epoch_loss:.4f} Acc: {epoch_acc:.4f}")
                if phase == "val" and epoch_acc > best_acc:
                    best_acc = epoch_acc
                    torch.save(model.state_dict(), best_model_params_path)
        print(f"Training complete in {time.time() - since:.0f}s, best {best_acc:.4f}")
        model.load_state_dict(torch.load(best_model_params_path, weights_only=True))
    return model


net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
net[3] = nn.Linear(4 * 36, 2)
net = net.to(device)
sgd = optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
train_model(net, nn.CrossEntropyLoss(), sgd, lr_scheduler.StepLR(sgd, step_size=1, gamma=0.1))
