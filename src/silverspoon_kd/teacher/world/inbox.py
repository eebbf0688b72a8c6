"""What the teacher answers is received as it comes, also while the student is busy with something else."""

import logging
import threading
from queue import SimpleQueue

from silverspoon_kd.teacher.world.link import Link, Message

logger = logging.getLogger(__name__)

_GRACE = 1.0  # seconds; others may wait in a collective for this process to end

Answers = SimpleQueue[Message | Exception]


class Inbox:
    """A thread that receives the answers to requests, in the order of the requests.

    It waits only while an answer is due: a student may be silent for as long as it likes.

    Args:
        link: to the teacher's processes.
        num_taps: activations of a request.
    """

    def __init__(self, link: Link, num_taps: int) -> None:
        self._link, self._num_taps = link, num_taps
        self._due: SimpleQueue[tuple[int, list[int], Answers] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def expect(self, request: int, sources: list[int]) -> Answers:
        """Return where the answers to a request will be: the messages of each of ``sources``, or what went wrong."""
        answers = Answers()
        self._due.put((request, sources, answers))
        return answers

    def close(self) -> None:
        """End the thread; if an answer is due, wait until it is there or the teacher's processes have ended."""
        self._due.put(None)
        self._thread.join(_GRACE)

    def _run(self) -> None:
        broken: Exception | None = None
        while (due := self._due.get()) is not None:
            request, sources, answers = due
            try:
                if broken is not None:
                    raise broken
                self._receive(request, sources, answers)
            except Exception as error:
                logger.debug("The wire to the teacher broke: %s", error)
                broken = error
                answers.put(error)
            del due, answers  # nobody may want them any more

    def _receive(self, request: int, sources: list[int], answers: Answers) -> None:
        """Take turns, so that the first activation of all sources is there before the second of one."""
        missing: dict[int, int | None] = dict.fromkeys(sources)
        while missing:
            for source in list(missing):
                message = self._link.receive(source)
                if message.content["id"] != request:
                    continue  # of one that ended with an error
                answers.put(message)
                if "error" in message.content:
                    return
                left = missing[source] or self._num_taps * message.content["parts"]
                missing[source] = left - 1
                if left == 1:
                    del missing[source]
