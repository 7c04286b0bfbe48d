"""The board: words, sealed memory, and readers in other processes."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.board import (
    LANE_WORDS,
    MAX_SLOTS,
    TICKET_WORDS,
    Board,
    Phase,
    SlotWord,
    Word,
    pack_queue,
    unpack_queue,
)


@pytest.fixture
def board() -> Board:
    return Board.create(3)


@given(st.integers(0, 1 << 40), st.integers(0, (1 << 24) - 1), st.integers(0, (1 << 24) - 1))
def test_the_queue_word_gives_back_what_went_in(sequence: int, running: int, queued: int) -> None:
    word = pack_queue(sequence, running, queued)

    assert 0 <= word < 1 << 64
    assert unpack_queue(word) == (running, queued)


def test_the_queue_word_saturates() -> None:
    assert unpack_queue(pack_queue(0, 1 << 30, 1 << 30)) == ((1 << 24) - 1, (1 << 24) - 1)


def test_a_new_slot_reads_as_unknown(board: Board) -> None:
    record = board.read(0)

    assert (record.incarnation, record.phase) == (0, Phase.NONE)
    assert board.running(0) == []


def test_slots_do_not_touch_each_other(board: Board) -> None:
    top = (1 << 64) - 1
    for word in SlotWord:
        board.set_slot(1, word, top)
    board.set_running(1, range(TICKET_WORDS))
    for lane in range(LANE_WORDS):
        board.set_beside(1, lane, top)

    for slot in (0, 2):
        assert all(board.get_slot(slot, word) == 0 for word in SlotWord)
        assert board.running(slot) == []
    assert board.get(Word.SLOTS) == 3


def test_claiming_clears_the_predecessors_words_and_keeps_the_supervisors(board: Board) -> None:
    board.claim(0, 1, 111)
    board.set_slot(0, SlotWord.PROGRESS, 99)
    board.set_slot(0, SlotWord.SET_BATCH_PPM, 500_000)
    board.set_running(0, [1, 2])

    board.claim(0, 2, 222)

    record = board.read(0)
    assert (record.incarnation, record.pid, record.progress) == (2, 222, 0)
    assert board.running(0) == []
    assert board.get_slot(0, SlotWord.SET_BATCH_PPM) == 500_000


def test_running_tickets_are_read_back(board: Board) -> None:
    tickets = [1, 1 << 60, 7]
    board.set_running(2, tickets)
    assert board.running(2) == tickets

    board.set_running(2, [])
    assert board.running(2) == []


def test_what_threads_have_beside_the_batch_is_named_too_each_once(board: Board) -> None:
    board.set_running(1, [5, 6])
    for lane, ticket in ((0, 7), (1, 8), (LANE_WORDS - 1, 8), (3, 6)):
        board.set_beside(1, lane, ticket)
    assert board.running(1) == [5, 6, 7, 8]
    assert board.running(0) == board.running(2) == []

    for lane in (0, 1, LANE_WORDS - 1):
        board.set_beside(1, lane, 0)
    assert board.running(1) == [5, 6]

    board.claim(1, 2, 222)
    board.set_running(1, [9])
    assert board.running(1) == [9]


def test_a_lane_that_is_not_there_is_refused(board: Board) -> None:
    with pytest.raises(IndexError, match="lane 128 of 128"):
        board.set_beside(0, LANE_WORDS, 1)


def test_more_tickets_than_fit_mean_suspect_all(board: Board) -> None:
    board.set_running(0, range(TICKET_WORDS))
    assert board.running(0) == list(range(TICKET_WORDS))

    board.set_running(0, range(TICKET_WORDS + 1))
    assert board.running(0) is None


def test_an_impossible_phase_is_unknown_never_idle(board: Board) -> None:
    board.set_slot(0, SlotWord.PHASE, 77)

    assert board.read(0).phase is Phase.NONE


def test_a_slot_out_of_range_is_refused(board: Board) -> None:
    with pytest.raises(IndexError, match="slot 3 of 3"):
        board.read(3)
    with pytest.raises(IndexError):
        board.set_slot(-1, SlotWord.PID, 1)


@pytest.mark.parametrize("slots", [0, -1, MAX_SLOTS + 1])
def test_a_board_of_impossible_size_is_refused(slots: int) -> None:
    with pytest.raises(ValueError, match="slots"):
        Board.create(slots)


def test_a_board_can_neither_shrink_nor_grow(board: Board) -> None:
    size = os.fstat(board.fd).st_size
    for wanted in (0, size - 8, size + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(board.fd, wanted)


def test_a_second_mapping_sees_the_same_words(board: Board) -> None:
    other = Board.attach(os.dup(board.fd))
    board.set(Word.ROUTER_EPOCH, 42)
    other.set_slot(2, SlotWord.BEAT_NS, 7)

    assert other.get(Word.ROUTER_EPOCH) == 42
    assert board.get_slot(2, SlotWord.BEAT_NS) == 7
    other.close()


def test_what_is_no_board_is_refused() -> None:
    fd = os.memfd_create("stranger")
    with pytest.raises(ValueError, match="no board"):
        Board.attach(fd)

    os.ftruncate(fd, os.fstat(Board.create(1).fd).st_size)
    with pytest.raises(ValueError, match="magic"):
        Board.attach(fd)
    os.close(fd)


def test_another_layout_is_refused(board: Board) -> None:
    board.set(Word.LAYOUT, 99)

    with pytest.raises(ValueError, match="layout 99"):
        Board.attach(board.fd)


WRITER = """
import sys
from gpupool.board import Board, SlotWord, pack_queue
board = Board.attach(int(sys.argv[1]))
top = (1 << 24) - 1
board.set_slot(0, SlotWord.QUEUE, pack_queue(0, top, top))
print("ready", flush=True)
sys.stdin.close()
while not board.get_slot(1, SlotWord.PID):
    board.set_slot(0, SlotWord.QUEUE, pack_queue(0, 1, 1))
    board.set_slot(0, SlotWord.QUEUE, pack_queue(0, top, top))
"""


@pytest.mark.processes
def test_a_reader_never_sees_half_a_word_that_another_process_writes(board: Board) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(board.fd)], pass_fds=[board.fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        seen = {unpack_queue(board.get_slot(0, SlotWord.QUEUE)) for _ in range(100_000)}
        board.set_slot(1, SlotWord.PID, 1)
        assert writer.wait(10) == 0

    top = (1 << 24) - 1
    assert seen <= {(1, 1), (top, top)}


def test_the_memory_is_there_from_the_start(board: Board) -> None:
    assert os.fstat(board.fd).st_blocks * 512 >= os.fstat(board.fd).st_size // mmap.PAGESIZE * mmap.PAGESIZE
