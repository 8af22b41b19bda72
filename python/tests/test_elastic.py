"""Parts of phalanx.torch.elastic in one process; tools/ci/elastic.py --python runs whole trainings whose ranks are killed."""

import os
import random
import tempfile
import unittest
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import phalanx.torch.elastic as elastic


def as_rank(rank, world):
    return mock.patch.object(elastic, "_rank_and_world", lambda: (rank, world))


class Samples(unittest.TestCase):
    def batches(self, sampler, world):
        """The global batches, of the ranks' parts with a weight."""
        parts = []
        for rank in range(world):
            with as_rank(rank, world):
                sampler.done = 0
                parts.append([])
                for batch in sampler:
                    weight = sampler.weighted(torch.ones(())).item()
                    parts[rank].append(batch if weight else [])
                    sampler.done += 1
        sampler.done = 0
        return list(zip(*parts))

    def test_each_sample_once(self):
        for samples, batch in ((100, 12), (97, 8), (5, 4), (1, 3)):
            for drop_last in (False, True):
                sampler = elastic.Sampler(samples, batch, drop_last=drop_last, seed=5)
                whole = [sorted(sum(parts, [])) for parts in self.batches(sampler, 1)]
                self.assertEqual(len(whole), len(sampler))
                if not drop_last:
                    self.assertEqual(sorted(sum(whole, [])), list(range(samples)))
                for world in (2, 3, 7):
                    # The step has the same samples with any number of ranks.
                    self.assertEqual([sorted(sum(parts, [])) for parts in self.batches(sampler, world)], whole)

    def test_the_order_is_pytorchs(self):
        data = list(range(96))
        for epoch in (0, 3):
            sampler = elastic.Sampler(data, 12, seed=7)
            sampler.set_epoch(epoch)
            for rank in range(3):
                theirs = DistributedSampler(data, 3, rank, seed=7)
                theirs.set_epoch(epoch)
                with as_rank(rank, 3):
                    self.assertEqual(sum(sampler, []), list(theirs))

    def test_weighted_means_are_the_mean_of_the_batch(self):
        values = torch.randn(11, dtype=torch.float64)
        for world in (1, 2, 3, 5):
            sampler = elastic.Sampler(11, 4)
            for batch, parts in enumerate(self.batches(sampler, world)):
                sampler.done = batch
                total = 0.0
                for rank, part in enumerate(parts):
                    with as_rank(rank, world):
                        total += sampler.weighted(values[part].mean() if part else torch.zeros(())) / world
                torch.testing.assert_close(total, values[sum(parts, [])].mean(), check_dtype=False)

    def test_an_epoch_continues_where_it_was(self):
        sampler = elastic.Sampler(100, 10)
        whole = list(sampler)
        sampler.done = 4
        other = elastic.Sampler(100, 10)
        other.load_state_dict(sampler.state_dict())
        other.set_epoch(0)
        self.assertEqual(list(other), whole[4:])
        self.assertEqual(len(other), 10)
        other.set_epoch(1)
        self.assertEqual(len(list(other)), 10)

    def test_mistakes(self):
        for samples, batch in ((0, 1), (3, 0)):
            with self.assertRaises(ValueError):
                elastic.Sampler(samples, batch)
        with self.assertRaises(ValueError):
            elastic.State(save_every=3)


class Kept(unittest.TestCase):
    def test_a_step_is_undone(self):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        state = elastic.State(model=model, optimizer=optimizer, scheduler=scheduler, seen=[], best=1.5)

        def step():
            loss = model(torch.randn(8, 3)).square().mean() + random.random()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            state.seen.append(loss.item())
            state.best -= 0.1

        def numbers():
            state_of = optimizer.state_dict()["state"].values()
            tensors = [*model.state_dict().values(), *(t for one in state_of for t in one.values())]
            return [t.clone() for t in tensors], list(state.seen), state.best, scheduler.last_epoch, optimizer.param_groups[0]["lr"]

        for _ in range(3):
            step()
            state._commit()
        want = numbers()
        for _ in range(3):
            step()
            after = numbers()
            state._roll_back()
            torch.testing.assert_close(numbers(), want, rtol=0, atol=0)
            # The same step again, with the same random numbers.
            step()
            torch.testing.assert_close(numbers(), after, rtol=0, atol=0)
            state._roll_back()

    def test_without_a_launcher(self):
        def run(epochs, folder, resume):
            """How many steps were taken, and what they have led to."""
            torch.manual_seed(1)
            model = torch.nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            sampler = elastic.Sampler(20, 4)
            loader = DataLoader(torch.arange(40.0).view(20, 2) / 40, batch_sampler=sampler, num_workers=1)
            state = elastic.State(model=model, optimizer=optimizer, sampler=sampler, steps=0, folder=folder, save_every=5, resume=resume)

            @elastic.run(state)
            def train(state):
                before = state.steps
                ddp = torch.nn.parallel.DistributedDataParallel(state.model)
                for epoch in range(sampler.epoch, epochs):
                    sampler.set_epoch(epoch)
                    for x in loader:
                        ddp(x).sum().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        state.steps += 1
                        state.between_steps()
                return state.steps - before

            try:
                took = train()
                self.assertEqual(dist.get_backend(), "phalanx")
            finally:
                dist.destroy_process_group()
            momenta = [one["momentum_buffer"] for one in optimizer.state_dict()["state"].values()]
            return took, [*model.state_dict().values(), *momenta]

        with tempfile.TemporaryDirectory() as folder:
            want = run(2, folder + "/whole", False)
            self.assertEqual(want[0], 10)
            self.assertEqual(run(1, folder, True)[0], 5)
            took, got = run(2, folder, True)
            self.assertEqual(took, 5)
            torch.testing.assert_close(got, want[1], rtol=0, atol=0)
            took, got = run(2, folder, True)
            self.assertEqual(took, 0)
            torch.testing.assert_close(got, want[1], rtol=0, atol=0)
            self.assertEqual(sorted(os.listdir(folder)), ["step-10", "step-5", "whole"])


if __name__ == "__main__":
    unittest.main()
