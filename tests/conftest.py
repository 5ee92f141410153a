from collections import Counter

import torch
from transformers.utils import logging

# The tensors are tiny: several threads would only wait for each other.
torch.set_num_threads(1)
# A bar of a model that a test saves would stand in what the test says a command printed.
logging.disable_progress_bar()


def pytest_terminal_summary(terminalreporter):
    """Say before the closing line what was not checked on this machine, and why."""
    reasons = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"not run: {count} × {reason.removeprefix('Skipped: ')}")
