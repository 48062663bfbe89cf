"""The messages that cross processes, each with its dataclass. Only gRPC code imports this."""

from __future__ import annotations

from kvrelay.v1 import controller_pb2, hand_over_pb2, inference_pb2, worker_pb2
from kvrelay.wire.agent_description import AgentDescription
from kvrelay.wire.cluster_state import ClusterState
from kvrelay.wire.codec import Codec
from kvrelay.wire.hand_over import FromDecode, FromPrefill, Open, Sequenced
from kvrelay.wire.load import WorkerStatus
from kvrelay.wire.output import EngineOutputs, PhaseTimings
from kvrelay.wire.page_owners import PageOwners
from kvrelay.wire.submit import AttachRequest, GenerationParams, StructuredOutput
from kvrelay.wire.worker_list import WorkerList

AGENT = Codec(AgentDescription, hand_over_pb2.DescribeAgentResponse)
HAND_OVER_OPEN = Codec(Open, hand_over_pb2.HandOverOpen)
FROM_DECODE: Codec[Sequenced[FromDecode], hand_over_pb2.HandOverRequest]
FROM_DECODE = Codec(Sequenced, hand_over_pb2.HandOverRequest, message=FromDecode)
FROM_PREFILL: Codec[Sequenced[FromPrefill], hand_over_pb2.HandOverResponse]
FROM_PREFILL = Codec(Sequenced, hand_over_pb2.HandOverResponse, message=FromPrefill)
ENGINE_OUTPUTS = Codec(EngineOutputs, worker_pb2.AttachResponse)
TIMINGS = Codec(PhaseTimings, inference_pb2.PhaseTimings)
WORKER_STATUS = Codec(WorkerStatus, inference_pb2.WorkerStatus)
CLUSTER_STATE = Codec(ClusterState, controller_pb2.GetClusterResponse)
WORKER_LIST = Codec(WorkerList, controller_pb2.WatchWorkersResponse)
PAGE_OWNERS = Codec(PageOwners, worker_pb2.GetPageOwnersResponse)
GENERATION_PARAMS = Codec(GenerationParams, inference_pb2.SamplingParams)
STRUCTURED_OUTPUT = Codec(StructuredOutput, inference_pb2.StructuredOutput)
ATTACH_REQUEST = Codec(AttachRequest, worker_pb2.AttachRequest)
