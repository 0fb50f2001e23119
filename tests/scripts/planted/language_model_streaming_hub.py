# planted: EV106, line 17
import os

import torch
from datasets import load_dataset
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
tokenizer = AutoTokenizer.from_pretrained("gpt2")
dataset = load_dataset("allenai/c4", "en", split="train", streaming=True)
tokenized = dataset.map(lambda row: tokenizer(row["text"], truncation=True, max_length=512), remove_columns=["text"])
loader = DataLoader(tokenized, batch_size=8)
model = DDP(AutoModelForCausalLM.from_pretrained("gpt2").cuda(local_rank), device_ids=[local_rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
max_steps = 10_000
for step, batch in enumerate(loader):
    ids = torch.stack(batch["input_ids"], dim=1).to(local_rank)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step >= max_steps:
        break
dist.destroy_process_group()
