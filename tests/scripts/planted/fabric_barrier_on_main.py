# planted: EV401, line 27
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset


class Runner:
    def __init__(self, fabric):
        self.fabric = fabric
        model = torch.nn.Linear(5, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.model, self.optimizer = fabric.setup(model, optimizer)
        loader = DataLoader(TensorDataset(torch.randn(60, 5), torch.randint(2, (60,))), batch_size=6, shuffle=True)
        self.loader = fabric.setup_dataloaders(loader)

    def fit(self):
        for epoch in range(2):
            for x, y in self.loader:
                self.optimizer.zero_grad()
                self.fabric.backward(torch.nn.functional.cross_entropy(self.model(x), y))
                self.optimizer.step()
            if self.fabric.is_global_zero:
                self.write(epoch)

    def write(self, epoch):
        torch.save(self.model.state_dict(), f"epoch-{epoch}.pt")
        self.fabric.barrier()


fabric = Fabric(accelerator="cpu", devices=2)
fabric.launch()
Runner(fabric).fit()
