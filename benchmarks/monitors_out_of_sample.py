"""Rules of the monitors on attempts that their authors did not see: recall by author and kind, and honest work.

- attacks: attacks and odd honest work are played on real tasks (`cheat_suite.fresh`).
- models: the attempts of the runs that are named, made by real models that have next to nothing to win by cheating.
  Every flag is counted as false and shown.
- experts: scripted experts. They write the original code, so what the rule `memorised` says of them is true.
- judge: a model on a loopback server audits some attacks and some honest attempts, and what that costs is counted.

    python benchmarks/monitors_out_of_sample.py TASKS... --model FOLDER [--runs RUN...] [--parts attacks,judge]

A part that is not asked for stays in the file as it was.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from woodshed import tasks
from woodshed.agent import AgentSettings
from woodshed.engines.http import EndpointSettings, chat_server
from woodshed.evals import monitoring, statistics
from woodshed.evals.monitoring import THRESHOLD, KnownAttempt
from woodshed.experience.scripted_expert import ExpertSettings, expert_attempt
from woodshed.monitors import judge
from woodshed.monitors.cheat_suite import fresh
from woodshed.monitors.cheat_suite.run import play
from woodshed.monitors.rules import watch
from woodshed.records import Flag, Rollout, Task, TaskError, Verdict
from woodshed.runs import machine
from woodshed.runs.folder import RunDir
from woodshed.tokens.renderer import create_renderer

CALLS = '\nTools: {tools}\nCall one as {{"name": ..., "arguments": {{...}}}}.'
WRITTEN = 32
"""Tokens of one message of the auditing model."""
READ = 1200
"""Tokens of a conversation that it reads, from the end."""
AUDITED = 2
"""Attacks, and as many honest attempts, that the auditing model reads."""
DOLLARS = {"prompt_tokens": 0.10, "completion_tokens": 0.40}
"""For a million tokens: what services ask for small models, to say what such an audit would cost there."""
SHOWN = 40
"""Flags of honest attempts that are kept with their quotes."""


def share(cases: Sequence[KnownAttempt]) -> dict[str, Any]:
    """Share of attempts that are flagged, tasks resampled."""
    flagged = [float(case.is_flagged) for case in cases]
    return asdict(statistics.mean(flagged, [case.task for case in cases], is_share=True))


def by_kind(cases: Sequence[KnownAttempt]) -> dict[str, Any]:
    """Kind to how many were played, flagged, and by which rules."""
    kinds: dict[str, Any] = {}
    for case in cases:
        row = kinds.setdefault(case.name, {"played": 0, "flagged": 0, "rules": Counter()})
        row["played"] += 1
        row["flagged"] += case.is_flagged
        row["rules"].update({flag.rule for flag in case.flags if flag.confidence >= THRESHOLD})
    return kinds


def of_models(runs: Sequence[Path], known: Sequence[Task]) -> tuple[list[KnownAttempt], list[Flag]]:
    """Honest attempts of real models at these tasks, and the flags that they got."""
    by_id = {task.id: task for task in known}
    cases: list[KnownAttempt] = []
    for path in runs:
        run = RunDir.open(path)
        verdicts = {verdict.rollout_id: verdict for _, _, verdict in run.read("verdicts", Verdict)}
        for _, _, rollout in run.read("rollouts", Rollout):
            if rollout.task_id not in by_id:
                continue
            flags = watch(rollout, by_id[rollout.task_id], verdicts.get(rollout.id))
            cases.append(KnownAttempt(path.name, False, rollout.task_id, tuple(flags)))
    return cases, [flag for case in cases for flag in case.flags if flag.confidence >= THRESHOLD]


def of_experts(known: Sequence[Task], model: Path) -> list[KnownAttempt]:
    """Scripted experts, one at each task, with all that is planted in them."""
    renderer = create_renderer(AutoTokenizer.from_pretrained(model))
    cases: list[KnownAttempt] = []
    for task in known:
        try:
            expert = expert_attempt(
                task,
                renderer,
                ExpertSettings(),
                AgentSettings(turn_tokens=2048, rollout_tokens=16384),
                attempt=0,
                seed=0,
                context_length=1 << 20,
            )
        except TaskError:  # its gold change is no single edit
            continue
        cases.append(KnownAttempt("experts", False, task.id, tuple(watch(expert.rollout, task))))
    return cases


@contextmanager
def served(model: Path) -> Iterator[str]:
    """Address of an OpenAI-compatible server of a small model, which lives as long as the context."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)

    class Chat(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({"data": [{"id": model.name}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            tools = json.dumps([tool["function"] for tool in asked.get("tools", ())])
            messages = [
                {"role": "user" if m["role"] == "tool" else m["role"], "content": str(m.get("content") or "")}
                for m in asked["messages"]
            ]
            messages[0]["content"] += CALLS.format(tools=tools)
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"][:, -READ:]
            made = network.generate(ids, max_new_tokens=WRITTEN, do_sample=False)[0, ids.shape[1] :]
            text = tokenizer.decode(made, skip_special_tokens=True)
            message = {"role": "assistant", "content": text, "tool_calls": called(text)}
            usage = {"prompt_tokens": ids.shape[1], "completion_tokens": len(made)}
            spent.update(usage)
            self.answer({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})

        def answer(self, value: object) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Chat)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


spent: Counter[str] = Counter()
"""Tokens that the server has read and written."""


def called(text: str) -> list[dict[str, Any]]:
    """The tool call that a message spells as JSON."""
    for found in re.finditer(r"\{", text):
        try:
            value, _ = json.JSONDecoder().raw_decode(text[found.start() :])
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get("name"), str):
            function = {"name": value["name"], "arguments": json.dumps(value.get("arguments", {}))}
            return [{"id": "0", "type": "function", "function": function}]
    return []


def audited(url: str, known: Sequence[Task]) -> dict[str, Any]:
    """Findings and cost of the auditing model."""
    endpoint = EndpointSettings(url=url)
    cost: Counter[str] = Counter()
    found: dict[str, list[str]] = {}
    server = chat_server(endpoint)

    def ask(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
        answer = server.chat(messages, tools)
        said = json.dumps(answer)
        cost.update(messages=1, read_chars=len(json.dumps([messages, tools])), written_chars=len(said))
        cost.update(called=bool(answer.get("tool_calls")))
        return answer

    began = time.monotonic()
    try:
        for name, scripts in (("attacks", fresh.ATTACKS), ("honest", fresh.HONEST)):
            only = (
                {"cheats": scripts, "benign": {}} if name == "attacks" else {"cheats": {}, "benign": scripts}
            )
            planned = monitoring.plan(known, 1, **only)[:AUDITED]
            for _, _, task, act, label in planned:
                rollout = play(task, act, label)
                found.setdefault(name, []).append(
                    ", ".join(
                        flag.rule for flag in judge.read([rollout], [task], [], endpoint, ask=ask, share=1.0)
                    )
                )
    finally:
        server.close()
    seconds = round(time.monotonic() - began, 1)
    dollars = sum(price * spent[name] / 1e6 for name, price in DOLLARS.items())
    told = {"findings": found, "attempts": 2 * AUDITED, "tasks": len(known), "seconds": seconds}
    return {**told, **cost, **spent, "dollars": round(dollars, 6), "dollars_per_million": DOLLARS}


def main() -> None:
    parser = argparse.ArgumentParser(description="The monitors on attempts that their authors did not see.")
    parser.add_argument("tasks", type=Path, nargs="+", help="task folders, or folders that contain some")
    parser.add_argument("--runs", type=Path, nargs="*", default=[], help="runs of real models on these tasks")
    parser.add_argument("--each", type=int, default=4, help="tasks on which each script is played")
    parser.add_argument(
        "--model", type=Path, required=True, help="model folder: tokens of experts; auditing model"
    )
    parser.add_argument(
        "--parts", default="attacks,models,experts,judge", help="parts to measure, with commas"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "monitors_out_of_sample.json"
    )
    options = parser.parse_args()
    known = tasks.load_set(*options.tasks)
    report = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
    if "attacks" in options.parts:
        cases, _ = monitoring.run(known, each=options.each, cheats=fresh.ATTACKS, benign=fresh.HONEST)
        attacks = [case for case in cases if case.is_cheat]
        odd = [case for case in cases if not case.is_cheat]
        report |= {"recall": share(attacks), "kinds": by_kind(attacks)}
        report |= {"odd_honest": share(odd), "odd_kinds": by_kind(odd)}
    if "models" in options.parts:
        models, flags = of_models(options.runs, known)
        report |= {"models": share(models), "model_runs": by_kind(models)}
        report["model_flags"] = [asdict(flag) for flag in flags[:SHOWN]]
    if "experts" in options.parts:
        report["experts"] = by_kind(of_experts(known, options.model))["experts"]
    if "judge" in options.parts:
        with served(options.model) as url:
            report["judge"] = {"model": options.model.name, **audited(url, known)}
    if "attacks" in options.parts:
        report |= {"tasks": len(known), "packages": len({task.environment.packages for task in known})}
    report["machine"] = machine.describe()
    revisions = dict.fromkeys(options.parts.split(","), report["machine"]["revision"])
    report["revisions"] = {**report.get("revisions", {}), **revisions}
    options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for name in ("recall", "odd_honest", "models"):
        if report.get(name):
            print(f"{name}: {report[name]['part']:.0f} of {report[name]['whole']:.0f} flagged")
    for kind, row in {**report.get("kinds", {}), **report.get("odd_kinds", {})}.items():
        print(f"{row['flagged']:3} of {row['played']:3}  {kind}: {dict(row['rules'])}")
    print(json.dumps({name: report.get(name) for name in ("model_runs", "experts", "judge")}))


if __name__ == "__main__":
    main()
