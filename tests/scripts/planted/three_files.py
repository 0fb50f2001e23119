# planted: EV101, line 10
"""The loop, the data and the script in three files, with imports from module to module."""
from three_files_parts import Trainer, build_data
from three_files_parts.setup import join, leave


def main():
    rank = join()
    train_set = build_data()
    Trainer(train_set, rank).fit(3)
    leave()


if __name__ == "__main__":
    main()
