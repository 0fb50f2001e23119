# clean
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import evenstep


def main():
    with evenstep.init(seed=0) as world:
        data = TensorDataset(torch.randn(500, 16), torch.randint(0, 4, (500,)))
        loader = evenstep.DataLoader(data, global_batch_size=64, shuffle=True)
        model = evenstep.DistributedDataParallel(torch.nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        checkpoint = evenstep.Checkpointer("runs/clean", model=model, optimizer=optimizer, loader=loader)
        checkpoint.resume()
        for epoch in loader.epochs(3):
            for x, y in world.progress(loader):
                loss = F.cross_entropy(model(x), y)
                model.backward(loss, weight=len(x))
                optimizer.step()
                optimizer.zero_grad()
                checkpoint.step()
            world.print(f"epoch {epoch}: {world.mean(loss):.4f}")


if __name__ == "__main__":
    main()
