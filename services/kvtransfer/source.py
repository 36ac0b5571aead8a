"""P's side of the handoff: barriers turn into frames, grants into sends, the last acknowledgement into release (pure)."""

from collections.abc import Callable, Iterator
from typing import ClassVar

from k3mesh.errors import TransferFailed
from services.contracts.barriers import ChunkStarted, FieldsReady, ForgetLocal, HandoffReady
from services.contracts.geometry import PAGED, blocks_for
from services.contracts.placement import Manifest, Placement, chunk_positions
from services.kvtransfer import messages as m
from services.kvtransfer.extents import bytes_of, frames_of
from services.kvtransfer.pieces import cut
from services.kvtransfer.rooms import Offered, Outgoing, Peer, Source
from services.kvtransfer.session import Limits, Phase, Session

SEQS = 1 << 32


class SourceSession(Session):
    """All rooms of one prefill rank."""

    handlers: ClassVar[dict[type, str]] = {
        m.FromPeer: "_from_peer",
        m.LinkUp: "_link_up",
        m.LinkLost: "_link_lost",
        m.CancelRoom: "_cancel",
        ChunkStarted: "_chunk",
        FieldsReady: "_ready",
        HandoffReady: "_handoff",
        ForgetLocal: "_forget",
        m.Sent: "_sent",
    }
    from_peer: ClassVar[dict[type, str]] = {
        m.Offer: "_offer",
        m.Grant: "_grant",
        m.StageAck: "_acked",
        m.CancelRoom: "_peer_cancel",
        m.Drained: "_peer_drained",
    }

    def __init__(self, placement: Placement, limits: Limits):
        super().__init__(placement, limits)
        self._payloads = tuple(field.payload for field in placement.fields)
        self._paged = tuple(field.kind == PAGED for field in placement.fields)
        self._peers: dict[m.Link, Peer] = {}
        self._rooms: dict[m.Room, Source] = {}
        self._steps: dict[int, list[tuple[m.Room, range, bool]]] = {}  # rows of running engine steps: room, positions, last
        self._frames: dict[Offered, Outgoing] = {}
        self._pending: dict[m.Room, list[m.Extent]] = {}  # written during this event

    # ---- links
    def _link_up(self, event: m.LinkUp) -> None:
        """A decode agent has one link at a time, so an older one is over, even if we have not seen its end yet."""
        for link, peer in list(self._peers.items()):
            if _same_rank(peer.placement, event.peer):
                reason = f"{event.peer.name} has linked again"
                self.emit(m.CloseLink(link, reason))
                self._link_lost(m.LinkLost(link, reason))
        self._peers[event.link] = Peer(event.peer, progress_at=self._now)
        for room, source in self._waiting_for(event.peer):
            if source.peer.engine_epoch != event.peer.engine_epoch:
                self._fail(room, m.transfer_failed("PD_PEER_DEAD", f"{event.peer.name} has restarted"))
            elif source.done:  # its acknowledgement may have been lost with the link
                self.tell(event.link, self._end_of(room, source))

    def _link_lost(self, event: m.LinkLost) -> None:
        peer = self._peers.pop(event.link, None)
        if peer is None:
            return
        failure = m.transfer_failed("PD_PEER_DEAD", f"the link to {peer.placement.name} is lost: {event.reason}")
        for room, source in [it for it in self._rooms.items() if it[1].link == event.link]:
            if source.phase is Phase.FAILED:
                source.grants_over, source.peer_waits = True, False
                self._settle(room)
            elif event.gone:
                self._fail(room, failure, tell_peer=False)
            else:
                self._suspend(source)

    def _suspend(self, source: Source) -> None:
        """Until D offers it over another link. Frames that nobody will ask for any more are forgotten."""
        source.link, source.resume_by = None, self._now + self.limits.resume
        self._drop_offers(source)

    def _waiting_for(self, peer: Placement) -> list[tuple[m.Room, Source]]:
        """Rooms without a link that this rank, in whichever life, has offered."""
        return [
            (room, source)
            for room, source in self._rooms.items()
            if source.link is None and source.phase is not Phase.FAILED and _same_rank(source.peer, peer)
        ]

    def _from_peer(self, event: m.FromPeer) -> None:
        handler = self.from_peer.get(type(event.message))
        if handler is None or event.link not in self._peers:
            self.stale()
            return
        getattr(self, handler)(event.link, event.message)

    # ---- bootstrap
    def _offer(self, link: m.Link, offer: m.Offer) -> None:
        manifest = offer.manifest
        source = self._rooms.get(manifest.room)
        if source is not None and self._is_of(source, link, manifest.attempt) and source.link is None:
            self._resume(manifest.room, source, link)
            return
        failure = self._refusal(link, manifest)
        self.tell(link, m.OfferReply(manifest.room, manifest.attempt, failure))
        if failure is None:
            deadline = self._now + manifest.timeout + self.limits.grace
            peer = self._peers[link].placement
            self._rooms[manifest.room] = Source(link, peer, manifest, deadline, progress_at=self._now)
            self.report(m.RoomReady(manifest.room, manifest.attempt, manifest.prompt_tokens))

    def _resume(self, room: m.Room, source: Source, link: m.Link) -> None:
        """Over a new link: all that is written is sent again."""
        source.send_again(link)
        source.progress_at = self._now
        self.tell(link, m.OfferReply(room, source.manifest.attempt))
        self._pending[room] = list(source.written)
        self._finish(room, source)

    def _refusal(self, link: m.Link, manifest: Manifest) -> m.Failure | None:
        if manifest.room in self._rooms:
            return m.transfer_failed("PD_MANIFEST", f"room {manifest.room:x} is offered twice to {self.placement.name}")
        if manifest.room in self.tombstones:
            return m.Failure("cancelled", f"room {manifest.room:x} has ended on {self.placement.name}", "PD_STALE")
        try:
            manifest.check(self._peers[link].placement)
        except TransferFailed as error:
            return m.Failure.of(error)
        needed = blocks_for(manifest.prompt_tokens)
        if needed >= self.placement.num_blocks:
            return m.transfer_failed(
                "PD_MANIFEST",
                f"room {manifest.room:x}: {manifest.prompt_tokens} prompt tokens take {needed} blocks, "
                f"{self.placement.name} has {self.placement.num_blocks - 1}",
            )
        return None

    # ---- the worker's barriers
    def _chunk(self, event: ChunkStarted) -> None:
        rows: list[tuple[m.Room, range, bool]] = []
        for row in event.rows:
            source = self._rooms.get(row.room)
            if source is None or source.phase is Phase.FAILED:
                continue  # a stopped row stays in the batches that some stage has seen
            first = source.phase is Phase.BOOTSTRAPPED
            if first:
                source.phase = Phase.WAITING_FOR_INPUT
            source.table += row.new_blocks
            source.slot = row.slot
            rows.append((row.room, chunk_positions(source.manifest, row.start, row.end, first, row.last), row.last))
        self._steps[event.step_id] = rows

    def _ready(self, event: FieldsReady) -> None:
        steps = self.placement.producer_steps
        over = event.hi >= len(steps)
        rows = self._steps.pop(event.step_id, []) if over else self._steps.get(event.step_id, [])
        written = [index for step in steps[event.lo : event.hi] for index in step]
        paged = tuple(index for index in written if self._paged[index])
        slots = tuple(index for index in written if not self._paged[index])
        for room, positions, last in rows:
            source = self._rooms.get(room)
            if source is None or source.phase is Phase.FAILED:
                continue
            if paged and positions:
                self._write(room, source, m.Extent(paged, positions.start, len(positions)))
            if slots and last:
                self._write(room, source, m.Extent(slots, 0, 1))
            if last and over:
                self._complete(room, source)

    def _write(self, room: m.Room, source: Source, extent: m.Extent) -> None:
        source.written.append(extent)
        source.written_bytes += bytes_of(extent, self._payloads)
        if source.link is not None:
            self._pending.setdefault(room, []).append(extent)

    def _complete(self, room: m.Room, source: Source) -> None:
        expected = self.placement.expected_bytes(len(source.manifest.blocks))
        if source.written_bytes != expected:
            message = f"room {room:x}: the barriers of {self.placement.name} cover {source.written_bytes} bytes of {expected}"
            self._fail(room, m.transfer_failed("PD_BYTES", message))
            return
        source.complete = True
        self._finish(room, source)

    def _handoff(self, event: HandoffReady) -> None:
        source = self._rooms.get(event.room)
        if source is None or source.phase is Phase.FAILED:
            return
        source.handoff = event.handoff
        self._finish(event.room, source)

    def _forget(self, event: ForgetLocal) -> None:
        """Nothing to do: a room's table goes with the room."""

    # ---- frames
    def pump(self) -> None:
        """Offer what is written. Nothing is copied before D has granted it: until then a frame is but its extents."""
        written, self._pending = self._pending, {}
        for room, extents in written.items():
            source = self._rooms[room]
            assert source.link is not None, "what is written without a link waits for the next"
            source.phase = Phase.TRANSFERRING
            source.progress_at = self._now
            frames = [
                self._offer_frame(room, source, source.link, *it)
                for it in frames_of(extents, self._payloads, self.limits.frame_bytes)
            ]
            self.tell(source.link, m.FrameBatch(room, source.manifest.attempt, tuple(frames)))
            self._finish(room, source)

    def _offer_frame(self, room: m.Room, source: Source, link: m.Link, extents: tuple[m.Extent, ...], length: int) -> m.Frame:
        units = [source.units(it, self._paged[it.fields[0]]) for it in extents]
        pieces = cut(units, self._payloads, self.limits.piece_bytes)
        peer = self._peers[link]
        seq, peer.next_seq = peer.next_seq, (peer.next_seq + len(pieces)) % SEQS
        self._frames[link, seq] = Outgoing(room, length, pieces)
        source.held.add((link, seq))
        source.offered_bytes += length
        source.offered_frames += 1
        return m.Frame(seq, length, extents)

    def _grant(self, link: m.Link, grant: m.Grant) -> None:
        """D has posted receives for these frames: they are sent, even if the room has failed here meanwhile."""
        self._peers[link].progress_at = self._now
        for seq in grant.seqs:
            held = self._frames.get((link, seq))
            if held is None or held.granted:
                self.stale()
                continue
            held.granted = True
            self.emit(m.Send(link, seq, held.pieces))

    def _sent(self, event: m.Sent) -> None:
        link, held = event.link, self._frames.pop((event.link, event.seq))
        room, source = held.room, self._rooms.get(held.room)
        if source is not None:
            source.held.discard((link, event.seq))
        if event.error is None:
            self.totals["bytes_sent"] += held.length
            self.totals["frames"] += 1
            if source is not None:
                source.progress_at = self._now
        elif event.peer_gone and link in self._peers:
            self.emit(m.CloseLink(link, event.error))
        elif source is not None and source.phase is not Phase.FAILED and source.link == link:
            self._fail(room, m.transfer_failed("PD_TRANSFER", f"room {room:x}: sending a frame failed: {event.error}"))
            return
        if source is not None and source.phase is Phase.FAILED:
            self._settle(room)

    # ---- the end
    def _finish(self, room: m.Room, source: Source) -> None:
        """Say StageDone once everything is offered and, on the last stage, the first token is known."""
        if source.done or source.link is None or not source.complete or source.offered_bytes != source.written_bytes:
            return
        if self._last_stage and source.handoff is None:
            return
        source.done = True
        source.progress_at = self._now
        self.tell(source.link, self._end_of(room, source))

    @property
    def _last_stage(self) -> bool:
        return self.placement.stage == self.placement.num_stages - 1

    def _end_of(self, room: m.Room, source: Source) -> m.StageDone:
        return m.StageDone(
            room,
            source.manifest.attempt,
            self.placement.stage,
            source.offered_bytes,
            source.offered_frames,
            source.manifest.slot_gen,
            source.handoff if self._last_stage else None,
        )

    def _acked(self, link: m.Link, ack: m.StageAck) -> None:
        source = self._rooms.get(ack.room)
        if source is None or not self._is_of(source, link, ack.attempt) or source.phase is Phase.FAILED or not source.done:
            self.stale()
            return
        self._peers[link].progress_at = self._now
        source.phase = Phase.SUCCESS
        self.totals["rooms_ok"] += 1
        self.report(m.SourceReleased(ack.room, source.offered_bytes))
        self._bury(ack.room)  # sends that have not been told complete finish by themselves

    def _cancel(self, event: m.CancelRoom) -> None:
        """From the scheduler. A room that is not known may be offered yet: its tombstone refuses it then."""
        source = self._rooms.get(event.room)
        if source is None:
            self.tombstones.add(event.room)
            self.report(m.Drained(event.room))
        elif source.phase is not Phase.FAILED:
            failure = event.failure or m.Failure("cancelled", f"room {event.room:x} was cancelled: {event.reason}")
            self._fail(event.room, failure, tell_scheduler=False)

    def _peer_cancel(self, link: m.Link, cancel: m.CancelRoom) -> None:
        source = self._rooms.get(cancel.room)
        if source is None or not self._is_of(source, link, source.manifest.attempt):
            self.tell(link, m.Drained(cancel.room))
            return
        source.link = link
        source.grants_over = source.peer_waits = True
        if source.phase is Phase.FAILED:
            self._settle(cancel.room)
        else:
            failure = cancel.failure or m.Failure("cancelled", f"room {cancel.room:x} was cancelled on D: {cancel.reason}")
            self._fail(cancel.room, failure, tell_peer=False)

    def _peer_drained(self, link: m.Link, drained: m.Drained) -> None:
        source = self._rooms.get(drained.room)
        if source is not None and source.link == link and source.phase is Phase.FAILED:
            source.grants_over = True
            self._settle(drained.room)

    def _fail(self, room: m.Room, failure: m.Failure, tell_scheduler: bool = True, tell_peer: bool = True) -> None:
        source = self._rooms[room]
        source.phase = Phase.FAILED
        source.drain_by = self._now + self.limits.drain
        self.totals["rooms_failed"] += 1
        self._pending.pop(room, None)
        if tell_scheduler:
            self.report(m.RoomFailed(room, source.manifest.attempt, failure))
        if tell_peer and source.link is not None:
            self.tell(source.link, m.CancelRoom(room, failure.message, failure))
        else:
            source.grants_over = True
        self._settle(room)

    def _settle(self, room: m.Room) -> None:
        """A failed room ends when no grant can come for it and none of its frames is in use."""
        source = self._rooms.get(room)
        if source is None or not source.grants_over:
            return
        self._drop_offers(source)
        if source.held:
            return
        if source.peer_waits and source.link is not None:
            self.tell(source.link, m.Drained(room))
        self.report(m.Drained(room))
        self._bury(room)

    def _drop_offers(self, source: Source) -> None:
        for frame in [frame for frame in source.held if not self._frames[frame].granted]:
            del self._frames[frame]
            source.held.discard(frame)

    def _bury(self, room: m.Room) -> None:
        self.tombstones.add(room, self._rooms.pop(room).phase)

    def _is_of(self, source: Source, link: m.Link, attempt: int) -> bool:
        """Whether this link, or one before it to the same life of the peer, is the room's."""
        mine = source.link == link or (source.link is None and source.peer == self._peers[link].placement)
        return mine and source.manifest.attempt == attempt

    # ---- time, counts, invariants
    def deadlines(self) -> Iterator[tuple[float, Callable[[], None]]]:
        for room, source in self._rooms.items():
            if source.phase is Phase.FAILED:
                if source.drain_by is not None:
                    yield source.drain_by, lambda source=source: self._cut(source)
                continue
            yield source.deadline, lambda room=room: self._late(room, "PD_TIMEOUT_WAIT", "the request's time is up")
            if source.link is None:
                yield source.resume_by, lambda room=room, source=source: self._not_resumed(room, source)
            elif source.done or any(not self._frames[frame].granted for frame in source.held):
                stalled = max(source.progress_at, self._peers[source.link].progress_at) + self.limits.progress
                yield stalled, lambda room=room: self._not_answered(room)

    def _not_resumed(self, room: m.Room, source: Source) -> None:
        self._late(room, "PD_PEER_DEAD", f"{source.peer.name} has not linked again within {self.limits.resume:g} s")

    def _not_answered(self, room: m.Room) -> None:
        self._late(room, "PD_TIMEOUT_WAIT", f"no answer from D in {self.limits.progress:g} s")

    def _late(self, room: m.Room, detail: str, what: str) -> None:
        if (source := self._rooms.get(room)) is not None and source.phase is not Phase.FAILED:
            self._fail(room, m.transfer_failed(detail, f"room {room:x} on {self.placement.name}: {what}"))

    def _cut(self, source: Source) -> None:
        source.drain_by = None
        if source.link is not None:
            self.emit(m.CloseLink(source.link, "a stopped room did not drain in time"))

    def counters(self) -> dict[str, int]:
        dead = sum(
            held.room not in self._rooms or self._rooms[held.room].phase is Phase.FAILED for held in self._frames.values()
        )
        return {
            "rooms": len(self._rooms),
            "pins": len(self._rooms),
            "frames_offered": len(self._frames),
            "quarantined": dead,
            "steps": len(self._steps),
            "links": len(self._peers),
        }

    def check(self) -> None:
        assert not self._pending
        for room, source in self._rooms.items():
            assert source.held == {frame for frame, held in self._frames.items() if held.room == room}
            lost = source.link is not None and source.link not in self._peers
            assert source.phase is Phase.FAILED or not lost, f"room {room:x} takes a link for live that is not"
            assert source.phase is not Phase.FAILED or source.held or not source.grants_over, f"room {room:x} should have ended"
        waiting = [held for held in self._frames.values() if not held.granted]
        assert all(held.room in self._rooms for held in waiting), "a frame waits for the grant of a room that is gone"


def _same_rank(one: Placement, other: Placement) -> bool:
    """In whichever life."""
    return (one.engine_id, one.global_rank) == (other.engine_id, other.global_rank)
