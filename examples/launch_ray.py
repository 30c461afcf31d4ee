"""Start training from Ray Train, whose restarts continue from the last checkpoint, bit for bit.

    python examples/launch_ray.py --storage /tmp/ray-results

Two CPU workers represent two nodes: `topology=1` says so. With `--gpus` each worker has a GPU, and nodes are
found by host name. `--storage` is a folder or bucket that all nodes reach. Needs `pip install 'ray[train]'`.
"""

import argparse
import tempfile
from typing import Any

import ray.train
import ray.train.torch
from launched import Run


def train(settings: dict[str, Any]) -> None:
    """Run on every worker; Ray has started them and joined them by init_process_group."""
    run = Run(ray.train.torch.get_device(), topology=settings["topology"])
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:  # a restart: Ray Train has started all workers again
        with checkpoint.as_directory() as folder:
            run.load(folder)
    while run.step < 12:
        metrics = {"loss": run.train_step(), "step": run.step}
        if run.step % 4:
            ray.train.report(metrics)
        else:
            # Every worker writes the files of its rank; Ray collects them in one folder of the storage.
            with tempfile.TemporaryDirectory() as folder:
                run.save(folder)
                ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))
    if ray.train.get_context().get_world_rank() == 0:
        print(run.comm.explain())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true")
    options = parser.parse_args()
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"topology": "auto" if options.gpus else 1},
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers, use_gpu=options.gpus),
        run_config=ray.train.RunConfig(
            storage_path=options.storage, failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()
