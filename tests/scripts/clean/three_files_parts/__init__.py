from .data import build_data
from .loop import *
