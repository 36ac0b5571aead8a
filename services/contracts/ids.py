"""Typed ids, so that the checker catches a swapped pair."""

from typing import NewType

RequestId = NewType("RequestId", str)
Room = NewType("Room", int)  # 63 random bits, new for each attempt
BlockId = NewType("BlockId", int)  # 128 cache rows; 0 is the null block
SlotId = NewType("SlotId", int)  # one request's KDA state; 0 is the null slot
ImageBlock = NewType("ImageBlock", int)  # a cache block's size of host memory, for images of suspended requests
Place = NewType("Place", int)  # a sequence place of one decode replica, 0..per_replica-1
Replica = NewType("Replica", int)
GlobalRank = NewType("GlobalRank", int)
Token = NewType("Token", int)
BlockKey = NewType("BlockKey", bytes)  # names the tokens of a full block and all before it

TOKEN_BYTES = 4  # of a token id in a prompt: little-endian uint32
NULL_BLOCK = BlockId(0)
NULL_SLOT = SlotId(0)
BLOCK_TOKENS = 128
