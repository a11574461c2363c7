"""The stock `wandb agent` trains with a shipped sweep, told what to do by a server on loopback."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_mgpu.cli.yaml_files import CONFIGS

SWEEP = (CONFIGS / "sweep" / "lenet_lr.yaml").read_text()  # as it is shipped
SWEEP_ID, RUN_ID = "abcd1234", "run45678"
SHORT = {"data.source": "synthetic", "trainer.max_epochs": 1, "trainer.accelerator": "cpu", "trainer.devices": 1}
SHORT |= {f"trainer.limit_{part}_batches": 1 for part in ("train", "val", "test")}
ARGS = {"model.optimizer.lr": 0.0625, "run_dir": "run", "wandb.mode": "offline", **SHORT}


class Agents(BaseHTTPRequestHandler):
    """Of W&B's GraphQL the calls an agent makes; the first heartbeat is answered with a run."""

    num_heartbeats = 0

    def do_POST(self) -> None:
        query = self.rfile.read(int(self.headers["Content-Length"])).decode()
        answer: dict[str, Any] = {"viewer": {"id": "1", "username": "me", "entity": "me", "flags": "{}"}}
        if "query SweepWithRuns" in query:
            answer = {"project": {"sweep": {"id": "1", "name": SWEEP_ID, "config": SWEEP, "runs": {"edges": []}}}}
        elif "mutation CreateAgent" in query:
            answer = {"createAgent": {"agent": {"id": "agent"}}}
        elif "mutation Heartbeat" in query:
            given = {name: {"value": value} for name, value in ARGS.items()}
            run = {"type": "run", "run_id": RUN_ID, "program": "lightning_mgpu", "args": given}
            commands = [] if Agents.num_heartbeats else [run]
            Agents.num_heartbeats += 1
            answer = {"agentHeartbeat": {"agent": {"id": "agent"}, "commands": json.dumps(commands)}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": answer}).encode())

    def log_message(self, *args: object) -> None:
        """Nothing to the console."""


@pytest.mark.slow
def test_agent_runs_fit(tmp_path: Path) -> None:
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "PL_GLOBAL_SEED"))}
    env |= {"WANDB_API_KEY": "0" * 40, "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(path)}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])  # the sweep says `python`
    command = [sys.executable, "-m", "wandb", "agent", "--count=1", f"me/fashion/{SWEEP_ID}"]
    files: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    with ThreadingHTTPServer(("127.0.0.1", 0), Agents) as server:
        threading.Thread(target=server.serve_forever).start()
        env["WANDB_BASE_URL"] = f"http://127.0.0.1:{server.server_port}"
        try:
            agent = subprocess.run(command, cwd=tmp_path, env=env, timeout=200, **files)
        finally:
            server.shutdown()
    output = agent.stdout + agent.stderr
    assert agent.returncode == 0, output
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["model"]["init_args"]["optimizer"]["init_args"]["lr"] == ARGS["model.optimizer.lr"], output
    logged = (tmp_path / "run" / "metrics.csv").read_text()
    assert "val_acc" in logged and "test_acc" not in logged and not list((tmp_path / "run").glob("*.png"))  # a trial
    # the run is the one the agent named, and knows its sweep
    [recorded] = (tmp_path / "run" / "wandb").glob(f"offline-run-*-{RUN_ID}/*.wandb")
    assert SWEEP_ID.encode() in recorded.read_bytes()
