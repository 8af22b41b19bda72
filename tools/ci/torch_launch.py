"""What tools/ci/torch.sh starts: one all-reduce of PyTorch's over Gloo. With `fail`, its first attempt fails."""
import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if "fail" in sys.argv and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(5)
one = torch.ones(3)
dist.all_reduce(one)
assert one.tolist() == [float(dist.get_world_size())] * 3, one
print(f"sum of {dist.get_world_size()}", flush=True)
dist.destroy_process_group()
