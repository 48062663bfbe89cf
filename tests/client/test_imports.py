"""What the client needs: grpcio and protobuf."""

from __future__ import annotations

import json
import subprocess
import sys

_CODE = """
import json, sys
import grpc, grpc.aio, google.protobuf
before = set(sys.modules)
import kvrelay.client
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_nothing_but_grpc_and_protobuf_is_imported() -> None:
    run = subprocess.run([sys.executable, "-c", _CODE], check=True, capture_output=True)
    imported = set(json.loads(run.stdout))
    assert "kvrelay.client.blocking" in imported
    assert "kvrelay.client.asynchronous" in imported
    own = {name for name in imported if name.startswith("kvrelay.")}
    assert not [name for name in own if not name.startswith(("kvrelay.client", "kvrelay.v1"))]
    roots = {name.partition(".")[0] for name in imported - own}
    assert roots - sys.stdlib_module_names <= {"kvrelay", "grpc", "google"}
