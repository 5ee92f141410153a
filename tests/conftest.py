import torch
from transformers.utils import logging

# The tensors are tiny: several threads would only wait for each other.
torch.set_num_threads(1)
# A bar of a model that a test saves would stand in what the test says a command printed.
logging.disable_progress_bar()
