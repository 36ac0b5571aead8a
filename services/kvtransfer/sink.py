"""D's side of the handoff: manifests armed and offered, frames granted, verified, installed; all stages or nothing (pure)."""

from collections.abc import Callable, Iterator
from typing import ClassVar

from k3mesh.errors import TransferFailed
from services.contracts.geometry import PAGED
from services.contracts.placement import Manifest, Placement
from services.kvtransfer import messages as m
from services.kvtransfer.credits import FairQueue, FrameId, Ring
from services.kvtransfer.pieces import Units, cut
from services.kvtransfer.rooms import Claims, Incoming, Pairing, Share, Sink, end_fault
from services.kvtransfer.session import Limits, Phase, Session


class SinkSession(Session):
    """All rooms of one decode rank."""

    handlers: ClassVar[dict[type, str]] = {
        m.FromPeer: "_from_peer",
        m.Paired: "_paired",
        m.LinkLost: "_link_lost",
        m.PeerGone: "_peer_gone",
        Manifest: "_expect",
        m.CancelRoom: "_cancel",
        m.Received: "_received",
    }
    from_peer: ClassVar[dict[type, str]] = {
        m.OfferReply: "_offer_reply",
        m.FrameBatch: "_frame_batch",
        m.StageDone: "_stage_done",
        m.CancelRoom: "_peer_cancel",
        m.Drained: "_peer_drained",
    }

    def __init__(self, placement: Placement, limits: Limits):
        super().__init__(placement, limits)
        self._payloads = tuple(field.payload for field in placement.fields)
        self._pairing: Pairing | None = None
        self._lost: Pairing | None = None  # until it stands again or its rooms have given up
        self._loss = ""  # why
        self._rooms: dict[m.Room, Sink] = {}
        self._claims = Claims()
        self._ring: Ring[m.Link] = Ring(limits.frames, limits.window)
        self._frames: dict[FrameId, Incoming] = {}
        self._waiting: FairQueue[m.Link, tuple[m.Room, int, m.Frame]] = FairQueue()  # for credit: room, stage, frame

    # ---- the pairing
    def _paired(self, event: m.Paired) -> None:
        assert self._pairing is None, "a pairing is lost before the next one begins"
        own = {field.field_id: index for index, field in enumerate(self.placement.fields)}
        fields = tuple(tuple(own[field.field_id] for field in stage.fields) for stage in event.stages)
        pairing = Pairing(event.links, event.stages, fields)
        if self._lost is not None and self._lost.life != pairing.life:
            self._give_up("{} is in epoch {} now".format(*pairing.life))
        self._pairing, self._lost = pairing, None
        for sink in self._rooms.values():
            if sink.phase is not Phase.FAILED:
                sink.resume_by = None
                self._offer(sink, pairing)

    def _offer(self, sink: Sink, pairing: Pairing) -> None:
        for link, share in zip(pairing.links, sink.shares, strict=True):
            if not share.acked:
                self.tell(link, m.Offer(sink.manifest))

    def _link_lost(self, event: m.LinkLost) -> None:
        pairing = self._pairing
        if pairing is None or event.link not in pairing.links:
            return
        self._pairing, self._lost = None, pairing
        self._loss = f"the link to {pairing.stages[pairing.links.index(event.link)].name} is lost: {event.reason}"
        self._waiting = FairQueue()
        for room, sink in list(self._rooms.items()):
            if sink.phase is Phase.FAILED:
                sink.awaited.clear()
                sink.waiting.clear()
                self._settle(room)
            else:
                sink.begin_again(self._now + self.limits.resume)
        if event.gone:
            self._give_up("it is given up")

    def _peer_gone(self, event: m.PeerGone) -> None:
        if self._lost is not None:
            self._give_up(event.reason)

    def _give_up(self, reason: str) -> None:
        """The pairing that was lost does not come back: nor do its rooms."""
        self._lost = None
        for room, sink in list(self._rooms.items()):
            if sink.phase is not Phase.FAILED:
                self._fail(room, m.transfer_failed("PD_PEER_DEAD", f"{self._loss}; {reason}"))

    def _from_peer(self, event: m.FromPeer) -> None:
        handler = self.from_peer.get(type(event.message))
        if handler is None or self._pairing is None or event.link not in self._pairing.links:
            self.stale()
            return
        getattr(self, handler)(event.link, self._pairing.links.index(event.link), event.message)

    # ---- bootstrap
    def _expect(self, manifest: Manifest) -> None:
        """From the scheduler: arm the receive and offer it to every stage."""
        room = manifest.room
        known = self._rooms.get(room)
        if known is not None and known.phase is not Phase.FAILED and known.manifest != manifest:
            self._fail(room, m.transfer_failed("PD_MANIFEST", f"room {room:x} is expected twice, with different manifests"))
            return
        if known is not None or room in self.tombstones:
            self.stale()
            return
        pairing = self._pairing or self._lost
        failure = self._refusal(manifest)
        if failure is not None or pairing is None:
            failure = failure or m.transfer_failed(
                "PD_PEER_DEAD", f"room {room:x}: {self.placement.name} is linked to no prefill engine; pair it first"
            )
            self.totals["rooms_failed"] += 1
            self.report(m.RoomFailed(room, manifest.attempt, failure))
            self.report(m.Drained(room))
            self.tombstones.add(room)
            return
        positions = len(manifest.blocks)
        sink = self._rooms[room] = Sink(
            manifest,
            deadline=self._now + manifest.timeout,
            accept_by=self._now + self.limits.bootstrap,
            shares=[Share(stage.expected_bytes(positions)) for stage in pairing.stages],
        )
        self._claims.take(manifest)
        if self._pairing is not None:
            self._offer(sink, self._pairing)
        else:
            sink.resume_by = self._now + self.limits.resume

    def _refusal(self, manifest: Manifest) -> m.Failure | None:
        try:
            manifest.check(self.placement)
        except TransferFailed as error:
            return m.Failure.of(error)
        return self._claims.refusal(manifest, self._rooms)

    def _offer_reply(self, link: m.Link, stage: int, reply: m.OfferReply) -> None:
        sink = self._alive(reply.room, reply.attempt)
        if sink is None:
            self.stale()
        elif reply.failure is not None:
            self._fail(reply.room, reply.failure)
        else:
            sink.shares[stage].accepted = True
            if sink.phase is Phase.BOOTSTRAPPING and all(share.accepted for share in sink.shares):
                sink.phase = Phase.BOOTSTRAPPED

    # ---- frames
    def _frame_batch(self, link: m.Link, stage: int, batch: m.FrameBatch) -> None:
        sink = self._alive(batch.room, batch.attempt)
        if sink is None:
            self.stale()
            return
        for frame in batch.frames:
            wrong = self._announce(sink, stage, frame)
            if wrong is not None:
                self._fail(
                    batch.room, m.transfer_failed("PD_BYTES", f"room {batch.room:x}, stage {stage}, frame {frame.seq}: {wrong}")
                )
                return
            self._waiting.push(link, (batch.room, stage, frame))

    def _announce(self, sink: Sink, stage: int, frame: m.Frame) -> str | None:
        """Why this frame cannot be right, or None; its units then count as announced."""
        assert self._pairing is not None, "a live room has its pairing"
        # Only this stage's own answer counts: P starts when all stages accepted, and another's may still be on its way here.
        if not sink.shares[stage].accepted:
            return "it comes before the stage has accepted the room"
        if frame.length > self.limits.frame_bytes:
            return f"{frame.length} bytes are more than a frame's {self.limits.frame_bytes}"
        return sink.shares[stage].announce(frame, self._pairing.stages[stage], len(sink.manifest.blocks))

    def pump(self) -> None:
        """Grant what waits, as far as staging frames and windows allow: what is granted has its receives posted."""
        grants: dict[tuple[m.Link, m.Room], list[int]] = {}
        while (turn := self._waiting.turn(self._ring.can_take)) is not None:
            link, (room, stage, frame) = turn
            frame_id = self._ring.take(link)
            self._frames[frame_id] = Incoming(room, link, stage, frame, self._now)
            units = self._units(self._rooms[room], stage, frame)
            self.emit(m.Receive(frame_id, link, frame.seq, cut(units, self._payloads, self.limits.piece_bytes)))
            grants.setdefault((link, room), []).append(frame.seq)
        for (link, room), seqs in grants.items():
            self.tell(link, m.Grant(room, tuple(seqs)))

    def _received(self, event: m.Received) -> None:
        incoming = self._frames[event.frame]
        sink = self._destination(incoming)
        if event.peer_gone and self._pairing is not None and incoming.link in self._pairing.links:
            self.emit(m.CloseLink(incoming.link, event.error or ""))
            self._free(event.frame)
        elif sink is None:
            self._free(event.frame)
        elif event.error is not None:
            message = f"room {incoming.room:x}: receiving a frame of stage {incoming.stage} failed: {event.error}"
            self._fail(incoming.room, m.transfer_failed("PD_TRANSFER", message))
            self._free(event.frame)
        elif not event.intact:
            message = f"room {incoming.room:x}: a checksum of frame {incoming.frame.seq} of stage {incoming.stage} is wrong"
            self._fail(incoming.room, m.transfer_failed("PD_BYTES", message))
            self._free(event.frame)
        else:
            self.totals["bytes_received"] += incoming.frame.length
            self.totals["frames"] += 1
            if sink.phase is Phase.BOOTSTRAPPED:
                sink.phase = Phase.TRANSFERRING
            sink.first_byte, sink.last_byte = sink.first_byte or incoming.since, self._now
            share = sink.shares[incoming.stage]
            share.frames += 1
            share.bytes += incoming.frame.length
            self._free(event.frame)
            self._advance(incoming.room, sink, incoming.stage, incoming.link)

    def _units(self, sink: Sink, stage: int, frame: m.Frame) -> list[Units]:
        """Where its units belong on this rank."""
        assert self._pairing is not None, "a live room has its pairing"
        own = self._pairing.fields[stage]

        def units(extent: m.Extent) -> Units:
            fields = tuple(own[index] for index in extent.fields)
            if self.placement.fields[fields[0]].kind == PAGED:
                return Units(fields, sink.manifest.blocks[extent.first : extent.first + extent.count])
            return Units(fields, (sink.manifest.slot,))

        return [units(extent) for extent in frame.extents]

    def _free(self, frame: FrameId) -> None:
        incoming = self._frames.pop(frame)
        self._ring.give_back(frame)
        self._settle(incoming.room)

    # ---- the end
    def _stage_done(self, link: m.Link, stage: int, done: m.StageDone) -> None:
        sink = self._alive(done.room, done.attempt)
        again = sink is not None and sink.shares[stage].acked and sink.shares[stage].done == done
        if again or self.tombstones.succeeded(done.room):
            self.tell(link, m.StageAck(done.room, done.attempt))  # the first one may have been lost with its link
        if sink is None or not sink.shares[stage].accepted:
            self.stale()
            return
        share = sink.shares[stage]
        failure = end_fault(done, share, stage, len(sink.shares), sink.manifest, self.placement.verify_width)
        if failure is not None:
            self._fail(done.room, failure)
        elif share.done is not None:
            self.stale()
        else:
            share.done = done
            sink.handoff = done.handoff or sink.handoff
            self._advance(done.room, sink, stage, link)

    def _advance(self, room: m.Room, sink: Sink, stage: int, link: m.Link) -> None:
        """Acknowledge a complete stage; when all are, the rank is ready."""
        share = sink.shares[stage]
        if share.acked or share.done is None or share.frames != share.done.frames:
            return
        assert share.bytes == share.expected_bytes, "the frames of a stage add up to its units"
        share.acked = True
        self.tell(link, m.StageAck(room, sink.manifest.attempt))
        if not all(share.acked for share in sink.shares):
            return
        handoff = sink.handoff
        assert handoff is not None, "the last stage is acknowledged with its handoff"
        sink.phase = Phase.SUCCESS
        self.totals["rooms_ok"] += 1
        self.report(
            m.RankReady(
                room,
                sink.manifest.attempt,
                handoff.token,
                handoff.window,
                sum(share.bytes for share in sink.shares),
                sink.first_byte,
                sink.last_byte,
                handoff.cached_tokens,
            )
        )
        self._bury(room)

    def _cancel(self, event: m.CancelRoom) -> None:
        """From the scheduler. A room that is not here is drained."""
        sink = self._rooms.get(event.room)
        if sink is None:
            self.tombstones.add(event.room)
            self.report(m.Drained(event.room))
        elif sink.phase is not Phase.FAILED:
            failure = event.failure or m.Failure("cancelled", f"room {event.room:x} was cancelled: {event.reason}")
            self._fail(event.room, failure, tell_scheduler=False)

    def _peer_cancel(self, link: m.Link, stage: int, cancel: m.CancelRoom) -> None:
        sink = self._rooms.get(cancel.room)
        if sink is None:
            self.tell(link, m.Drained(cancel.room))
            return
        if sink.phase is not Phase.FAILED:
            failure = cancel.failure or m.Failure("cancelled", f"room {cancel.room:x} was cancelled on P: {cancel.reason}")
            self._fail(cancel.room, failure, but=link)
        sink.waiting.add(link)
        self._settle(cancel.room)

    def _peer_drained(self, link: m.Link, stage: int, drained: m.Drained) -> None:
        sink = self._rooms.get(drained.room)
        if sink is not None and sink.phase is Phase.FAILED:
            sink.awaited.discard(link)
            self._settle(drained.room)

    def _fail(
        self, room: m.Room, failure: m.Failure, tell_scheduler: bool = True, tell_peers: bool = True, but: m.Link | None = None
    ) -> None:
        """Stop the room: nothing is granted for it any more. `but` is the peer that stopped it."""
        sink = self._rooms[room]
        sink.phase = Phase.FAILED
        sink.drain_by = self._now + self.limits.drain
        self.totals["rooms_failed"] += 1
        self._waiting.drop(lambda item: item[0] == room)
        if tell_scheduler:
            self.report(m.RoomFailed(room, sink.manifest.attempt, failure))
        if tell_peers and self._pairing is not None:
            sink.awaited = {link for link in self._pairing.links if link != but}
            for link in self._pairing.links:
                if link != but:
                    self.tell(link, m.CancelRoom(room, failure.message, failure))
        self._settle(room)

    def _settle(self, room: m.Room) -> None:
        """A failed room answers each peer when nothing from it is in flight, and ends when all peers have answered too."""
        sink = self._rooms.get(room)
        if sink is None or sink.phase is not Phase.FAILED:
            return
        busy = {incoming.link for incoming in self._frames.values() if incoming.room == room}
        for link in sorted(sink.waiting - busy):
            sink.waiting.remove(link)
            self.tell(link, m.Drained(room))
        if not busy and not sink.awaited:
            self.report(m.Drained(room))
            self._bury(room)

    def _bury(self, room: m.Room) -> None:
        self.tombstones.add(room, self._rooms.pop(room).phase)

    def _destination(self, incoming: Incoming) -> Sink | None:
        """The room that a frame is for, if it goes on and the frame is of its present pairing."""
        live = self._pairing is not None and incoming.link in self._pairing.links
        return self._alive(incoming.room) if live else None

    def _alive(self, room: m.Room, attempt: int | None = None) -> Sink | None:
        sink = self._rooms.get(room)
        if sink is None or sink.phase is Phase.FAILED or (attempt is not None and attempt != sink.manifest.attempt):
            return None
        return sink

    # ---- time, counts, invariants
    def deadlines(self) -> Iterator[tuple[float, Callable[[], None]]]:
        for room, sink in self._rooms.items():
            if sink.phase is Phase.FAILED:
                if sink.drain_by is not None:
                    yield sink.drain_by, lambda sink=sink: self._cut(sink)
                continue
            yield sink.deadline, lambda room=room: self._late(room, "PD_TIMEOUT_WAIT", "the request's time is up")
            if sink.resume_by is not None:
                yield sink.resume_by, lambda room=room: self._not_resumed(room)
            if sink.phase is Phase.BOOTSTRAPPING:
                yield sink.accept_by, lambda room=room: self._not_accepted(room)
        for incoming in self._frames.values():
            if self._destination(incoming) is not None:
                yield incoming.since + self.limits.progress, lambda incoming=incoming: self._not_come(incoming)

    def _not_resumed(self, room: m.Room) -> None:
        self._late(room, "PD_PEER_DEAD", f"{self._loss}; it does not stand again after {self.limits.resume:g} s")

    def _not_accepted(self, room: m.Room) -> None:
        self._late(room, "PD_TIMEOUT_BOOT", f"not every prefill stage accepted within {self.limits.bootstrap:g} s")

    def _not_come(self, incoming: Incoming) -> None:
        what = f"a granted frame of stage {incoming.stage} did not come in {self.limits.progress:g} s"
        self._late(incoming.room, "PD_TIMEOUT_WAIT", what)

    def _late(self, room: m.Room, detail: str, what: str) -> None:
        if self._alive(room) is not None:
            self._fail(room, m.transfer_failed(detail, f"room {room:x} on {self.placement.name}: {what}"))

    def _cut(self, sink: Sink) -> None:
        """It did not drain: the endpoints are the fence."""
        sink.drain_by = None
        if self._pairing is not None:
            self.emit(m.CloseLink(self._pairing.links[0], "a stopped room did not drain in time"))

    def counters(self) -> dict[str, int]:
        return {
            "rooms": len(self._rooms),
            "pins": len(self._rooms),
            "staging_frames_used": self._ring.used,
            "quarantined": sum(self._destination(incoming) is None for incoming in self._frames.values()),
            "links": 0 if self._pairing is None else len(self._pairing.links),
        }

    def check(self) -> None:
        self._ring.check()
        assert len(self._frames) == self._ring.used
        for room, sink in self._rooms.items():
            waits = sink.resume_by is not None
            assert sink.phase is Phase.FAILED or waits is (self._pairing is None), f"room {room:x} lives without its pairing"
            assert self._claims.hold(sink.manifest), "a unit belongs to two rooms"
            in_flight = any(incoming.room == room for incoming in self._frames.values())
            assert sink.phase is not Phase.FAILED or in_flight or sink.awaited, f"room {room:x} should have ended"
        for incoming in self._frames.values():
            assert incoming.room in self._rooms, "a frame outlives its room"
