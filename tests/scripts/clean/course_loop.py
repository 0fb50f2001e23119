"""The loop of a course on transformers: accelerate, a metric, a linear schedule."""

import evaluate
import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, get_scheduler


def main():
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
    raw = load_dataset("glue", "mrpc")
    tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased")
    with accelerator.main_process_first():
        tokenized = raw.map(lambda each: tokenizer(each["sentence1"], each["sentence2"], truncation=True), batched=True)
    tokenized = tokenized.remove_columns(["sentence1", "sentence2", "idx"]).rename_column("label", "labels")
    collate = DataCollatorWithPadding(tokenizer=tokenizer)
    train_dataloader = DataLoader(tokenized["train"], shuffle=True, batch_size=8, collate_fn=collate)
    eval_dataloader = DataLoader(tokenized["validation"], batch_size=8, collate_fn=collate)
    model = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    train_dataloader, eval_dataloader, model, optimizer = accelerator.prepare(
        train_dataloader, eval_dataloader, model, optimizer
    )
    num_epochs = 3
    num_training_steps = num_epochs * len(train_dataloader)
    lr_scheduler = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=0, num_training_steps=num_training_steps)
    progress_bar = tqdm(range(num_training_steps), disable=not accelerator.is_local_main_process)
    metric = evaluate.load("glue", "mrpc")
    for epoch in range(num_epochs):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            progress_bar.update(1)
        model.eval()
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions, references = accelerator.gather_for_metrics((outputs.logits.argmax(-1), batch["labels"]))
            metric.add_batch(predictions=predictions, references=references)
        accelerator.print(f"epoch {epoch}:", metric.compute())
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained("out")


if __name__ == "__main__":
    main()
