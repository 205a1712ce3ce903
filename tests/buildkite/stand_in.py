# SPDX-License-Identifier: Apache-2.0
"""Stands in for `vllm serve MODEL --host HOST --port PORT`; its model is arithmetic.

Speaks as much of the OpenAI API as an evaluation needs: /health and /v1/completions.
It adds the two numbers of a question; what else it does, its own options say. Like
vLLM it has a child in its process group, whose command line names MODEL too.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CHILD = "import signal, sys, time; {}time.sleep(600)"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); "


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--right", type=int, default=10**9, help="right below this")
    parser.add_argument("--healthy-after", type=float, default=0, help="seconds")
    parser.add_argument("--dies", choices=["at-start", "at-question"])
    parser.add_argument("--refuses", action="store_true", help="error 500")
    parser.add_argument("--hangs", action="store_true", help="in each question")
    parser.add_argument("--deaf", action="store_true", help="to SIGTERM")
    return parser.parse_args()


def main() -> None:
    options = parse()
    child = [CHILD.format(DEAF if options.deaf else ""), options.model]
    subprocess.Popen([sys.executable, "-c", *child])
    print("stand-in: started", flush=True)
    if options.dies == "at-start":
        sys.exit("stand-in: no weights")
    if options.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    healthy_at = time.monotonic() + options.healthy_after

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, status: int, content: object) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            up = self.path == "/health" and time.monotonic() >= healthy_at
            self.answer(200 if up else 503, {})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            print(f"stand-in: asked {asked['prompt']!r}", flush=True)
            if options.dies:
                print("stand-in: out of memory", flush=True)
                os._exit(9)
            if options.hangs:
                time.sleep(600)
            if options.refuses or self.path != "/v1/completions":
                return self.answer(500, {"error": "refused"})
            one, other = map(int, re.findall(r"\d+", asked["prompt"])[-2:])
            total = one + other + (one >= options.right)
            text = f" It is {one} and {other}, so {total}."
            choices = [{"index": 0, "text": text, "finish_reason": "stop"}]
            return self.answer(200, {"model": asked["model"], "choices": choices})

    server = ThreadingHTTPServer((options.host, options.port), Handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main()
