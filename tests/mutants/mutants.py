"""Planted faults: small mistakes in the library that the tests must catch.

Each replaces a text that occurs once in its file. `run.py` plants them one after another and runs
their tests; `test_mutants.py` checks that the list still fits the code. (Mutation testing: DeMillo,
Lipton and Sayward, "Hints on Test Data Selection", 1978.)
"""

from __future__ import annotations

import dataclasses

ARITHMETIC, ORDER, MISSING_WAIT = "arithmetic", "order", "missing wait"
LOST_BUFFER, WRONG_SEED, SWALLOWED_ERROR = "lost buffer", "wrong seed", "swallowed error"

KINDS = (ARITHMETIC, ORDER, MISSING_WAIT, LOST_BUFFER, WRONG_SEED, SWALLOWED_ERROR)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A mistake in one file of the library.

    Attributes:
        name: what goes wrong, in a few words.
        kind: one of `KINDS`. A state that is lost in any way is a lost buffer; a check that no
            longer fails is a swallowed error.
        file: the file, relative to `src/evenstep`.
        old: a text that occurs exactly once in it.
        new: what replaces that text.
        tests: the tests that catch it: files, or file::test, relative to `tests`.
    """

    name: str
    kind: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


_ARITHMETIC = [
    Mutant(
        "the longer shards do not come first",
        ARITHMETIC,
        "batch/cut.py",
        "starts = [shard * size + min(shard, longer) for shard in range(shards + 1)]",
        "starts = [shard * examples // shards for shard in range(shards + 1)]",
        ("batch/test_cut.py::test_bounds_are_those_of_array_split",),
    ),
    Mutant(
        "runs of unequal devices leave shards out",
        ARITHMETIC,
        "batch/assignment.py",
        "for device in by_remainder[: len(items) - sum(lengths)]:",
        "for device in by_remainder[: len(items) % len(speeds)]:",
        ("batch/test_cut.py::test_the_lengths_of_runs_are_in_proportion_to_speeds",),
    ),
    Mutant(
        "the mean loss of a shard does not count its examples",
        ARITHMETIC,
        "shard/loss.py",
        "return (mean.float() if mean.dtype in HALF_PRECISION else mean) * examples, examples",
        "return mean.float() if mean.dtype in HALF_PRECISION else mean, 1",
        ("shard/test_loss.py::test_the_mean_is_that_of_the_whole_batch",),
    ),
    Mutant(
        "class weights are left out of the count",
        ARITHMETIC,
        "shard/loss.py",
        "count = counted.sum() if weight is None else torch.where(counted, weights, 0.0).sum()",
        "count = counted.sum()",
        ("shard/test_loss.py::test_the_mean_is_that_of_the_whole_batch",),
    ),
    Mutant(
        "gradients are divided by the examples, not by the counts",
        ARITHMETIC,
        "steps/update.py",
        "return mean, count / step.attempt.cut.divisor",
        "return mean, 1.0",
        ("shard/test_loss.py::test_the_mean_is_that_of_the_whole_batch",),
    ),
    Mutant(
        "the backward pass of a shard begins with 1",
        ARITHMETIC,
        "shard/forward_backward.py",
        "return max(1 / divisor, torch.finfo(dtype).tiny)",
        "return max(1.0, torch.finfo(dtype).tiny)",
        ("shard/test_scale_of_gradients.py",),
    ),
    Mutant(
        "a shard's weight is dropped from its running statistics",
        ARITHMETIC,
        "shard/forward_backward.py",
        "return weighted(buffer, work.weight)",
        "return weighted(buffer, 1)",
        ("replicas/test_buffer_rules.py::test_running_statistics_are_averaged_without_a_rule",),
    ),
    Mutant(
        "merged moments lack the variance between the parts",
        ARITHMETIC,
        "steps/executors/sync_batch_norm.py",
        "return Moments(count, mean, left.squares + right.squares + between)",
        "return Moments(count, mean, left.squares + right.squares)",
        ("shard/test_sync_batch_norm.py::test_merged_moments_are_those_of_all_values",),
    ),
    Mutant(
        "the running variance of a whole batch is the biased one",
        ARITHMETIC,
        "steps/executors/sync_batch_norm.py",
        "moments.squares / (moments.size - 1)",
        "moments.squares / moments.size",
        ("shard/test_sync_batch_norm.py::test_training_equals_the_whole_batch_up_to_rounding",),
    ),
    Mutant(
        "no process adds up the last elements of a bucket",
        ARITHMETIC,
        "collectives/transport.py",
        "elements * owner // owners for owner",
        "elements // owners * owner for owner",
        ("collectives/test_canonical.py",),
    ),
    Mutant(
        "a parameter is assigned to an owner whatever its size",
        ARITHMETIC,
        "collectives/owners.py",
        "loads[owner] += sizes[item]",
        "loads[owner] += 1",
        ("collectives/test_owners.py",),
    ),
    Mutant(
        "a missing gradient counts as +0",
        ARITHMETIC,
        "distributed/flat_buffers.py",
        "view.fill_(-0.0)",
        "view.fill_(0.0)",
        ("distributed/test_flat_buffers.py",),
    ),
    Mutant(
        "one slice alone gives the gradient of a layer's input",
        ARITHMETIC,
        "nn/sliced.py",
        "tree_sum(found[first : first + readers], torch.add)",
        "tree_sum(found[first : first + 1], torch.add)",
        ("nn/test_sliced_layers.py::test_a_linear_layer_of_any_shape",),
    ),
    Mutant(
        "a stage's sum is that of the left shards",
        ARITHMETIC,
        "stages/sums.py",
        "total = left if right is None else add_gradients(left, right)",
        "total = left",
        ("stages/test_staged_training.py::test_every_model_in_every_cut_equals_the_reference",),
    ),
    Mutant(
        "gradients of steps in flight are not clipped",
        ARITHMETIC,
        "steps/in_flight/proxy_update.py",
        "self._clip(step, [SimpleNamespace(grad=one) for one in root.gradients])",
        "self._clip(step, [SimpleNamespace(grad=None) for _ in root.gradients])",
        ("training/test_clip_norm.py::test_it_is_torchs_to_the_bit",),
    ),
    Mutant(
        "a metric is the mean of the batches' means",
        ARITHMETIC,
        "training/evaluation/evaluator.py",
        "sums[name] = (total + more_total, count + more_count)",
        "sums[name] = (total + more_total / more_count, count + 1)",
        (
            "training/test_trainer.py::"
            "test_evaluation_counts_every_example_once_and_changes_nothing",
        ),
    ),
    Mutant(
        "Lightning's scale of a loss does not reach its gradients",
        ARITHMETIC,
        "integrations/lightning_steps.py",
        "gradient = gradient * scale if is_scaled else gradient",
        "gradient = gradient.clone() if is_scaled else gradient",
        ("integrations/test_lightning_curves.py::test_gradients_in_the_hooks",),
    ),
    Mutant(
        "what Lightning logs weighs each shard alike",
        ARITHMETIC,
        "integrations/lightning_shards.py",
        "mean = (value * weight, weight) if weight else (0.0, 0)",
        "mean = (value, 1) if weight else (0.0, 0)",
        ("integrations/test_lightning_curves.py::test_all_kinds_of_logs",),
    ),
]

_ORDER = [
    Mutant(
        "a node of the tree splits in its middle",
        ORDER,
        "collectives/tree.py",
        "return lo + (1 << ((hi - lo - 1).bit_length() - 1))",
        "return (lo + hi) // 2",
        ("collectives/test_tree.py",),
    ),
    Mutant(
        "children of a node are added in the order of arrival",
        ORDER,
        "collectives/tree.py",
        "left, right = (value, other) if node in plan.lefts else (other, value)",
        "left, right = other, value",
        ("collectives/test_tree.py",),
    ),
    Mutant(
        "a last leaf without a neighbour comes first",
        ORDER,
        "collectives/tree.py",
        "level = above + level[len(above) * 2 :]",
        "level = level[len(above) * 2 :] + above",
        ("collectives/test_tree.py",),
    ),
    Mutant(
        "partial sums are added by the rank of their processes",
        ORDER,
        "collectives/canonical.py",
        "*before, (left, right) = forest.adds",
        "*before, (left, right) = [(0, number) for number in range(1, len(partials))]",
        ("collectives/test_canonical.py",),
    ),
    Mutant(
        "the tree over processes splits in its middle",
        ORDER,
        "collectives/partition.py",
        "middle = split_point(lo, hi)",
        "middle = (lo + hi) // 2",
        ("collectives/test_partition.py",),
    ),
    Mutant(
        "shards side by side are summed in the order of arrival",
        ORDER,
        "shard/lockstep.py",
        "return [brought[shard] for shard in range(self._shards)]",
        "return [*brought.values()]",
        ("shard/test_lockstep.py",),
    ),
    Mutant(
        "rows gathered from shards of unequal size are cut wrongly",
        ORDER,
        "shard/lockstep.py",
        "first = sum(map(len, brought[: shard.number]))",
        "first = shard.number * len(rows)",
        ("shard/test_all_gather.py",),
    ),
    Mutant(
        "slices are added one after another",
        ORDER,
        "nn/sliced.py",
        "total = tree_sum(results, torch.add)",
        "total = functools.reduce(torch.add, results)",
        ("nn/test_sliced_layers.py",),
    ),
    Mutant(
        "predictions are joined in the order in which shards end",
        ORDER,
        "steps/executors/independent.py",
        "return [attempt.work.results[shard] for shard in cut.part.run]",
        "return [*attempt.work.results.values()]",
        (
            "training/test_trainer.py::"
            "test_predictions_are_a_row_for_each_example_in_order_and_change_nothing",
        ),
    ),
    Mutant(
        "the outputs of a step lie in the order in which shards end",
        ORDER,
        "steps/reducer.py",
        "return [*map(attempt.work.results.get, range(len(attempt.cut.bounds)))], root",
        "leaves = [*attempt.work.results.values()]\n"
        "        return [*leaves, *[None] * (len(attempt.cut.bounds) - len(leaves))], root",
        ("steps/test_outputs.py",),
    ),
    Mutant(
        "tasks that are freed together start the last one first",
        ORDER,
        "engine/graph.py",
        "freed.sort(key=_number)",
        "freed.sort(key=_number, reverse=True)",
        ("engine/test_graph.py",),
    ),
    Mutant(
        "a lane takes the latest of bound and free jobs",
        ORDER,
        "engine/schedule.py",
        "free[0].number < queue[0].number",
        "free[0].number > queue[0].number",
        ("engine/test_schedule.py",),
    ),
    Mutant(
        "a stage goes forward before it goes backward",
        ORDER,
        "stages/turns.py",
        "key=lambda one: (not waiting[one], one)",
        "key=lambda one: (waiting[one], one)",
        ("stages/test_turns.py",),
    ),
]

_MISSING_WAIT = [
    Mutant(
        "a writer does not wait for readers",
        MISSING_WAIT,
        "engine/graph.py",
        "                node.missing += len(place.readers)\n"
        "                for reader in place.readers:\n"
        "                    reader.followers.append(node)\n",
        "",
        ("engine/test_graph.py",),
    ),
    Mutant(
        "waitall leaves a task unfinished",
        MISSING_WAIT,
        "engine/engine.py",
        "self._wait_until(0)",
        "self._wait_until(1)",
        ("engine/test_engine.py::test_waitall_waits_for_a_last_task_that_is_slow",),
    ),
    Mutant(
        "threads of lanes are not joined",
        MISSING_WAIT,
        "engine/lanes.py",
        "thread.join(_GRACE_S if lane in lost else None)",
        "thread.join(0.0)",
        ("engine/test_lanes.py", "engine/test_engine_threads.py"),
    ),
    Mutant(
        "a chunk is added up before its terms have arrived",
        MISSING_WAIT,
        "collectives/canonical.py",
        "wait_for(self._received, self._name)",
        "self._sent += self._received",
        ("collectives/test_canonical.py",),
    ),
    Mutant(
        "a sum is returned before all its chunks have arrived",
        MISSING_WAIT,
        "collectives/canonical.py",
        "wait_all(self._sent)",
        "self._sent.clear()",
        ("collectives/test_canonical.py",),
    ),
    Mutant(
        "the shards of a step in flight do not wait for the update before",
        MISSING_WAIT,
        "steps/in_flight/overlapped_pipeline.py",
        "reads=[self._model],",
        "reads=[],",
        ("training/test_in_flight.py::test_the_result_is_that_of_one_at_a_time",),
    ),
    Mutant(
        "a step does not wait for those in flight after a change of the module",
        MISSING_WAIT,
        "steps/pipeline.py",
        "self._replicas.is_outdated or self._update.is_outdated",
        "self._update.is_outdated",
        ("training/test_in_flight_module.py",),
    ),
    Mutant(
        "a step ends when its first device is done",
        MISSING_WAIT,
        "steps/pipeline.py",
        "            if ending.working:\n                return\n",
        "",
        ("training/test_trainer.py",),
    ),
    Mutant(
        "a device's shards side by side do not wait for their turn",
        MISSING_WAIT,
        "shard/lockstep.py",
        "self._is_free.acquire()",
        "self._is_free.acquire(blocking=False)",
        ("shard/test_lockstep.py::test_a_device_runs_one_shard_at_a_time",),
    ),
    Mutant(
        "a shard enters a stage without its turn",
        MISSING_WAIT,
        "stages/turns.py",
        "        gate.acquire()\n        if self._stopped:",
        "        gate.acquire(blocking=False)\n        if self._stopped:",
        ("stages/test_turns.py",),
    ),
    Mutant(
        "the first device to compute its slices wakes the lead",
        MISSING_WAIT,
        "nn/slice_runners.py",
        "            self.missing.discard(lane)\n"
        "            if not self.missing:\n"
        "                self.is_done.set()\n",
        "            self.missing.discard(lane)\n            self.is_done.set()\n",
        ("nn/test_slice_runners.py",),
    ),
    Mutant(
        "a checkpoint is saved without the steps in flight",
        MISSING_WAIT,
        "training/saver.py",
        "self._pipeline.finish()",
        "self._pipeline.refuse_here()",
        ("training/test_in_flight.py::test_a_checkpoint_waits_for_the_steps_in_flight",),
    ),
    Mutant(
        "closing a trainer does not wait for its checkpoint",
        MISSING_WAIT,
        "checkpoint/async_writer.py",
        "        try:\n            self.wait()\n",
        "        try:\n            self.check()\n",
        ("checkpoint/test_save_in_background.py",),
    ),
    Mutant(
        "a file is renamed before it is on the disk",
        MISSING_WAIT,
        "files.py",
        "            os.fsync(file.fileno())\n",
        "",
        (
            "test_write_file.py::"
            "test_the_draft_is_on_the_disk_before_it_is_renamed_and_the_folder_after",
        ),
    ),
    Mutant(
        "a checkpoint is renamed before its files are on the disk",
        MISSING_WAIT,
        "checkpoint/files.py",
        "for path in (folder / _TENSORS, folder / _MANIFEST, folder):",
        "for path in (folder,):",
        ("checkpoint/test_failed_saves.py", "checkpoint/test_files.py"),
    ),
]

_LOST_BUFFER = [
    Mutant(
        "a shard starts with the buffers of the one before",
        LOST_BUFFER,
        "shard/forward_backward.py",
        "replica.open_shard()",
        "replica.put_back_buffers()",
        ("replicas/test_buffer_rules.py",),
    ),
    Mutant(
        "a device keeps the opening buffers of its first step",
        LOST_BUFFER,
        "replicas/replicas.py",
        "            replica.opening = per_memory[memory]\n",
        "            replica.opening = replica.opening or per_memory[memory]\n",
        ("replicas/test_observers.py::test_every_layout_has_the_same_bits",),
    ),
    Mutant(
        "closing values of buffers do not reach the user's module",
        LOST_BUFFER,
        "replicas/replicas.py",
        "[opening if value is None else value for opening, value in pairs]",
        "[opening for opening, _ in pairs]",
        ("replicas/test_buffer_rules.py",),
    ),
    Mutant(
        "a shard that leaves a buffer alone counts as zero in its mean",
        LOST_BUFFER,
        "shard/partial_sum.py",
        "return (_unwritten(opening, left) if ours is None else ours) + addend",
        "return addend if ours is None else ours + addend",
        ("replicas/test_buffer_rules.py",),
    ),
    Mutant(
        "a tensor that forward assigns to a buffer is not its value",
        LOST_BUFFER,
        "replicas/replica.py",
        "return [slots[0][0].get(slots[0][1]) for slots in self._slots]",
        "return list(self.buffers)",
        ("training/test_half_a_step.py::test_assigning_a_buffer_is_writing_it",),
    ),
    Mutant(
        "an evaluation leaves the buffers that it has written",
        LOST_BUFFER,
        "steps/executors/independent.py",
        "        finally:\n            self.replicas.restore_opening()\n",
        "        finally:\n",
        (
            "training/test_trainer.py::"
            "test_evaluation_leaves_buffers_alone_that_the_model_writes_even_then",
        ),
    ),
    Mutant(
        "one memory does not get the new parameters",
        LOST_BUFFER,
        "replicas/replicas.py",
        "        for replica in self.copies:\n            broadcast(self.home, replica)\n",
        "        for replica in self.copies[1:]:\n            broadcast(self.home, replica)\n",
        ("steps/test_owners_in_one_process.py::test_on_any_devices",),
    ),
    Mutant(
        "a shard shares the memory of the user's batch",
        LOST_BUFFER,
        "devices/placement.py",
        "return tensor.to(target, copy=True, memory_format=memory_format)",
        "return tensor.to(target, memory_format=memory_format)",
        ("batch/test_cut.py",),
    ),
    Mutant(
        "gradients that share memory are added in place",
        LOST_BUFFER,
        "shard/partial_sum.py",
        "return gradient if is_alone and not gradient.is_conj() else gradient.clone()",
        "return gradient if is_alone or not gradient.is_conj() else gradient.clone()",
        ("shard/test_own_memory.py",),
    ),
    Mutant(
        "what a module writes into a carried tensor is lost",
        LOST_BUFFER,
        "stages/carried.py",
        "        for copies in self._tensors:\n            copies.write_back()\n",
        "        self._tensors.clear()\n",
        ("stages/test_staged_training.py::test_devices_with_memory_of_their_own",),
    ),
    Mutant(
        "a checkpoint lacks buffers that are not persistent",
        LOST_BUFFER,
        "checkpoint/training_state.py",
        "buffers=dict(model.named_buffers()),",
        "buffers={k: v for k, v in model.named_buffers() if k in model.state_dict()},",
        ("checkpoint/test_resume.py::test_a_buffer_that_is_not_persistent_is_saved",),
    ),
    Mutant(
        "a checkpoint lacks the objects of the user",
        LOST_BUFFER,
        "training/saver.py",
        "user_state=self._user_state.read(),",
        "user_state={},",
        ("training/test_user_state.py::test_an_average_and_a_second_optimizer_are_resumed",),
    ),
    Mutant(
        "a scheduler is not restored",
        LOST_BUFFER,
        "checkpoint/restore.py",
        "    restore_scheduler(scheduler, saved.scheduler)\n",
        "",
        ("checkpoint/test_resume.py",),
    ),
    Mutant(
        "a checkpoint in the background shares memory with the training",
        LOST_BUFFER,
        "checkpoint/async_writer.py",
        "encoded = encode(state.to_tree(), copies)",
        "encoded = encode(state.to_tree())",
        ("checkpoint/test_save_in_background.py",),
    ),
    Mutant(
        "a setting of the process ends with its first user",
        LOST_BUFFER,
        "devices/process_wide.py",
        "                if not users:\n                    entered.close()",
        "                if users <= 1:\n                    entered.close()",
        ("devices/test_process_wide.py",),
    ),
]

_WRONG_SEED = [
    Mutant(
        "all shards of a step draw the same numbers",
        WRONG_SEED,
        "batch/seeds.py",
        'return derive_seed("shard", seed, epoch, step, shard)',
        'return derive_seed("shard", seed, epoch, step)',
        ("batch/test_rng.py::test_every_shard_of_every_step_has_its_own_seed",),
    ),
    Mutant(
        "every epoch draws the same numbers",
        WRONG_SEED,
        "batch/seeds.py",
        'return derive_seed("shard", seed, epoch, step, shard)',
        'return derive_seed("shard", seed, step, shard)',
        ("batch/test_rng.py::test_every_shard_of_every_step_has_its_own_seed",),
    ),
    Mutant(
        "a lane keeps the generator of its last shard",
        WRONG_SEED,
        "batch/rng.py",
        "        _HERE.randomness = self._outer\n",
        "        self._generators.clear()\n",
        ("batch/test_rng.py::test_randomness_ends_with_its_context",),
    ),
    Mutant(
        "the steps of a later epoch are not counted from 0",
        WRONG_SEED,
        "steps/step.py",
        "return Position(self.steps_done, data.epoch, 0, data)",
        "return Position(self.steps_done, data.epoch, self.batch, data)",
        (
            "training/test_cursor.py::"
            "test_what_a_step_draws_follows_from_its_epoch_and_its_place_in_it",
        ),
    ),
    Mutant(
        "a resumed training draws from another place than its data",
        WRONG_SEED,
        "training/saver.py",
        "seeds = saved.seeds_at or saved.cursor",
        "seeds = saved.cursor",
        ("training/test_cursor.py",),
    ),
    Mutant(
        "all batches of an evaluation draw the same numbers",
        WRONG_SEED,
        "training/evaluation/evaluator.py",
        'functools.partial(derive_seed, "evaluation", experiment.seed, number)',
        'functools.partial(derive_seed, "evaluation", experiment.seed)',
        ("training/test_trainer.py::test_each_batch_of_an_evaluation_draws_numbers_of_its_own",),
    ),
    Mutant(
        "every epoch has the same order",
        WRONG_SEED,
        "data/order.py",
        'derive_seed("order", seed, epoch)',
        'derive_seed("order", seed)',
        ("data/test_order.py",),
    ),
    Mutant(
        "a sampler draws the same order in every epoch",
        WRONG_SEED,
        "data/generators.py",
        'derive_seed("sampler", seed, epoch)',
        'derive_seed("sampler", seed)',
        ("training/test_loaders.py::test_the_epochs_have_different_orders",),
    ),
    Mutant(
        "an example is augmented alike in every epoch",
        WRONG_SEED,
        "data/fetching.py",
        'derive_seed("example", self._seed, wanted.epoch, *where)',
        'derive_seed("example", self._seed, *where)',
        ("data/test_loader.py",),
    ),
    Mutant(
        "a collate_fn draws the same numbers for every batch",
        WRONG_SEED,
        "data/fetching.py",
        'derive_seed("collate", self._seed, wanted.epoch, wanted.step)',
        'derive_seed("collate", self._seed, wanted.epoch)',
        (
            "data/test_loader.py::"
            "test_a_collate_draws_numbers_of_its_own_for_each_batch_of_each_epoch",
        ),
    ),
    Mutant(
        "generators that were lent are not put back",
        WRONG_SEED,
        "data/generators.py",
        "                generator.write(state)\n        finally:  # Ctrl-C",
        "                pass\n        finally:  # Ctrl-C",
        ("data/test_seeded.py",),
    ),
    Mutant(
        "the state of numpy's generator is not restored",
        WRONG_SEED,
        "data/generators.py",
        'restore_states(DEFAULTS, [state_dict[name] for name in ("torch", "python", "numpy")])',
        'restore_states(DEFAULTS[:2], [state_dict[name] for name in ("torch", "python")])',
        ("training/test_user_state.py::test_the_default_generators_go_on",),
    ),
    Mutant(
        "all steps of Lightning draw the same numbers",
        WRONG_SEED,
        "integrations/lightning_steps.py",
        "even.position = Position(steps_done=done, batch=done)",
        "even.position = Position(steps_done=done)",
        ("integrations/test_lightning.py::test_each_step_draws_numbers_of_its_own",),
    ),
]

_SWALLOWED_ERROR = [
    Mutant(
        "an error that nobody waits for is lost",
        SWALLOWED_ERROR,
        "engine/engine.py",
        "            self._failed.add(task)\n",
        "            task.seen = True\n",
        ("engine/test_engine_errors.py",),
    ),
    Mutant(
        "a task runs although its input has failed",
        SWALLOWED_ERROR,
        "engine/graph.py",
        "            taker.suffer(cause)\n",
        "",
        ("engine/test_graph.py",),
    ),
    Mutant(
        "an error in a shard side by side is dropped",
        SWALLOWED_ERROR,
        "shard/lockstep.py",
        "            self._lockstep.stop()\n            raise\n",
        "            self._lockstep.stop()\n            return None\n",
        ("shard/test_lockstep.py::test_an_error_in_one_shard_stops_the_others",),
    ),
    Mutant(
        "a loss that is NaN is trained on",
        SWALLOWED_ERROR,
        "steps/update.py",
        "if not math.isfinite(mean):",
        "if math.isinf(mean):",
        ("training/test_trainer.py::test_nan_says_where",),
    ),
    Mutant(
        "a batch may be written to while its step is in flight",
        SWALLOWED_ERROR,
        "batch/cut.py",
        "if held and self.versions != versions_of(held):",
        "if held and len(self.versions) != len(versions_of(held)):",
        ("training/test_in_flight_errors.py::test_a_batch_written_to_right_after_step_returned",),
    ),
    Mutant(
        "a gradient may be added to twice",
        SWALLOWED_ERROR,
        "shard/partial_sum.py",
        "if late > early + 1:",
        "if late < early:",
        ("test_sameness.py::test_a_backward_pass_that_adds_to_a_gradient_twice",),
    ),
    Mutant(
        "an optimizer that couples tensors may be split by owners",
        SWALLOWED_ERROR,
        "steps/owners/separate_updates.py",
        "if not _same(alone.of(number), together.of(number)):",
        "if len(alone.of(number)) != len(together.of(number)):",
        ("steps/test_separate_updates.py",),
    ),
    Mutant(
        "the bits of a file of tensors are not compared",
        SWALLOWED_ERROR,
        "checkpoint/files.py",
        "if _describe(path) != needed:",
        'if _describe(path)["nbytes"] != needed["nbytes"]:',
        ("checkpoint/test_damaged_files.py::test_every_flipped_byte_is_found",),
    ),
    Mutant(
        "the fingerprint of a restored state is not compared",
        SWALLOWED_ERROR,
        "checkpoint/training_state.py",
        "if restored != self.fingerprint:",
        "if not restored:",
        ("checkpoint/test_resume.py::test_a_state_that_is_not_restored_is_noticed",),
    ),
    Mutant(
        "an error of the writer of checkpoints is dropped",
        SWALLOWED_ERROR,
        "checkpoint/async_writer.py",
        "            written.result()\n",
        "            written.exception()\n",
        ("checkpoint/test_save_in_background.py",),
    ),
    Mutant(
        "a shard that gives two results is not refused",
        SWALLOWED_ERROR,
        "contract/repeat.py",
        "differing = first_difference(replica, first, second)",
        'differing = ""',
        ("contract/test_self_check.py",),
    ),
    Mutant(
        "generators beside torch's default ones are not refused",
        SWALLOWED_ERROR,
        "contract/outside/foreign_draws.py",
        "if draw.outlives or any(_are_one(draw, other) for other in others):",
        "if draw.outlives:",
        ("contract/test_foreign_draws.py",),
    ),
    Mutant(
        "a shard may change a setting of the process",
        SWALLOWED_ERROR,
        "contract/outside/process_settings.py",
        "if now[name] != self._before[name]",
        "if name not in self._before",
        ("contract/test_process_settings.py",),
    ),
    Mutant(
        "parameters may be written by a shard",
        SWALLOWED_ERROR,
        "replicas/replicas.py",
        "if now != self._opened:",
        "if len(now) != len(self._opened):",
        ("contract/test_check_times.py::test_a_parameter_written_in_a_later_step_is_refused",),
    ),
    Mutant(
        "states that differ between two processes are accepted",
        SWALLOWED_ERROR,
        "distributed/consistency.py",
        "if len(set(states)) == 1:",
        "if len(set(states)) <= 2:",
        ("distributed/test_consistency.py",),
    ),
    Mutant(
        "processes in different calls are not refused",
        SWALLOWED_ERROR,
        "distributed/process_group.py",
        "if any(other != name for other in names.values()):",
        "if any(not other for other in names.values()):",
        ("distributed/test_process_group.py",),
    ),
    Mutant(
        "memory counts as shared without a proof",
        SWALLOWED_ERROR,
        "distributed/shared_memory.py",
        "read = tokens is not None and [one.numpy().tobytes() for one in tokens] == written",
        "read = tokens is not None and len(tokens) == len(written)",
        ("distributed/test_shared_memory.py",),
    ),
    Mutant(
        "a truncated file of images is read",
        SWALLOWED_ERROR,
        "data/idx.py",
        "if len(body) != promised:",
        "if len(body) > promised:",
        ("data/test_idx.py",),
    ),
    Mutant(
        "Trainer.load ignores a choice that differs from the saved one",
        SWALLOWED_ERROR,
        "training/setup/arguments.py",
        '"experiment": dataclasses.replace(saved, **choices)',
        '"experiment": dataclasses.replace(saved)',
        (
            "training/test_trainer_options.py::"
            "test_load_takes_the_same_experiment_and_refuses_another_one",
        ),
    ),
    Mutant(
        "transformers' trainer resumes another experiment",
        SWALLOWED_ERROR,
        "integrations/transformers.py",
        "if name in saved and saved[name] != value:",
        "if name not in saved:",
        ("integrations/test_transformers.py::test_a_checkpoint_of_another_experiment_is_refused",),
    ),
    Mutant(
        "a faster way to call a model may give other outputs",
        SWALLOWED_ERROR,
        "inference/fast_call.py",
        "if not difference <= _BOUND * max(largest, 1.0):",
        "if difference > max(largest, 1.0) / _BOUND:",
        ("inference/test_fast_call.py::test_a_method_that_gives_other_outputs_is_not_taken",),
    ),
    Mutant(
        "a damaged file of an exported model is loaded",
        SWALLOWED_ERROR,
        "inference/export.py",
        "if hashlib.sha256(body).hexdigest().encode() != content[-_DIGITS:]:",
        "if len(body) + _DIGITS != len(content):",
        ("inference/test_export.py::test_a_flipped_bit_anywhere_is_refused_before_torch_reads_it",),
    ),
]

_ACCELERATORS = [
    Mutant(
        "a shard's loss is read before its kernels have run",
        MISSING_WAIT,
        "shard/forward_backward.py",
        "        finish([streams.fence_here(replica.device)])",
        "        streams.fence_here(replica.device)",
        ("accelerator/test_sameness.py::test_every_layout_in_every_mode",),
    ),
    Mutant(
        "the sum of a step stays on the device of its first shard",
        MISSING_WAIT,
        "shard/partial_sum.py",
        "return root if is_there else _moved(root, home)",
        "return root",
        ("accelerator/test_sameness.py::test_every_layout_in_every_mode",),
    ),
    Mutant(
        "the memory of a task's arguments is not kept for its lane",
        MISSING_WAIT,
        "engine/streams.py",
        "    keep(task.arguments)\n",
        "",
        ("accelerator/test_waits.py::test_memory_of_a_plain_argument_is_kept_for_the_lane",),
    ),
    Mutant(
        "autograd has a thread of its own for each accelerator",
        ORDER,
        "devices/accelerator.py",
        "    torch.autograd.set_multithreading_enabled(False)\n",
        "",
        ("accelerator/test_sameness.py::test_every_model",),
    ),
    Mutant(
        "a moved model has parameters that its optimizer does not know",
        LOST_BUFFER,
        "replicas/copying.py",
        "        torch.__future__.set_swap_module_params_on_conversion(True)\n",
        "        pass\n",
        ("accelerator/test_sameness.py::test_every_layout_in_every_mode",),
    ),
    Mutant(
        "a failed assertion in a kernel counts as a lost device",
        SWALLOWED_ERROR,
        "devices/accelerator.py",
        " and _ASSERTION not in str(error)",
        "",
        ("accelerator/test_lost.py::test_a_label_that_is_no_class_is_the_program_s_mistake",),
    ),
    Mutant(
        "a lost device's stream is waited for",
        MISSING_WAIT,
        "engine/engine.py",
        "if lane not in self.lost_lanes]\n            fences",
        "]\n            fences",
        ("accelerator/test_lost.py::test_the_others_go_on_without_a_device_that_stands_still",),
    ),
]

MUTANTS: tuple[Mutant, ...] = (
    *_ARITHMETIC,
    *_ORDER,
    *_MISSING_WAIT,
    *_LOST_BUFFER,
    *_WRONG_SEED,
    *_SWALLOWED_ERROR,
    *_ACCELERATORS,
)
