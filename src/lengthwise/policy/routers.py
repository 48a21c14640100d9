"""Routers: the replica of an arriving request."""

from __future__ import annotations

from lengthwise.policy.contracts import router


@router
def round_robin(request_number, waiting):
    """All replicas in turn."""
    return request_number % len(waiting)


@router
def random(draw_a, waiting):
    """A random replica."""
    return int(draw_a * len(waiting))


@router(name="least_outstanding")
def fewest_requests(waiting, running):
    """The replica with the fewest waiting and running requests. Among equals the lowest number."""
    best = 0
    for replica in range(1, len(waiting)):
        if waiting[replica] + running[replica] < waiting[best] + running[best]:
            best = replica
    return best


@router(name="least_waiting")
def fewest_waiting(waiting):
    """The replica with the fewest waiting requests, not counting running ones (Vidur's "lor")."""
    best = 0
    for replica in range(1, len(waiting)):
        if waiting[replica] < waiting[best]:
            best = replica
    return best


@router
def vllm_internal(request_number, total_blocks, waiting, running, free_blocks):
    """The fewest requests, and fewest waiting where KV memory is short: vLLM's internal load balancer (0.32).

    A waiting request counts as 1 up to a KV usage of half, and as 4 at full usage. For request k the search begins at
    replica k (modulo their number), so that equally loaded replicas take turns.
    """
    replicas = len(waiting)
    first = request_number % replicas
    best, least = first, -1.0
    for i in range(replicas):
        replica = (first + i) % replicas
        usage = 1.0 - free_blocks[replica] / total_blocks
        load = waiting[replica] + running[replica] + waiting[replica] * 6.0 * max(0.0, usage - 0.5)
        if least < 0 or load < least:
            best, least = replica, load
    return best


@router(name="least_tokens")
def fewest_tokens(tokens):
    """The replica with the fewest prompt and predicted output tokens of its requests; unpredicted outputs count 0."""
    best = 0
    for replica in range(1, len(tokens)):
        if tokens[replica] < tokens[best]:
            best = replica
    return best


@router
def shortest_expected_delay(waiting, running, service_rate):
    """The replica with the fewest requests for its speed, this one included: (requests + 1) / service rate.

    Also weighted join-the-shortest-queue (Banawan and Zeidat 1992; Selen et al., Queueing Systems 84, 2016). With
    equal speeds it is ``least_outstanding``.
    """
    best, least = 0, (waiting[0] + running[0] + 1) / service_rate[0]
    for replica in range(1, len(waiting)):
        delay_s = (waiting[replica] + running[replica] + 1) / service_rate[replica]
        if delay_s < least:
            best, least = replica, delay_s
    return best


@router(name="least_work_left")
def work_left(prompt_tokens, tokens, service_rate):
    """The replica that ends its prompt and predicted output tokens first: (tokens + prompt tokens) / service rate.

    With equal speeds it is ``least_tokens``.
    """
    best, least = 0, (tokens[0] + prompt_tokens) / service_rate[0]
    for replica in range(1, len(tokens)):
        work_s = (tokens[replica] + prompt_tokens) / service_rate[replica]
        if work_s < least:
            best, least = replica, work_s
    return best


@router
def power_of_two(draw_a, draw_b, waiting, running):
    """The less loaded of two replicas drawn at random."""
    a = int(draw_a * len(waiting))
    b = int(draw_b * len(waiting))
    return a if waiting[a] + running[a] <= waiting[b] + running[b] else b


@router
def central():
    """No replica: one queue for all replicas, from which each takes requests when it forms a step."""
    return -1


@router
def session_affinity(previous_replica, waiting, running):
    """The replica of the session's previous turn. A first turn goes to the replica with the fewest requests."""
    if previous_replica >= 0:
        return previous_replica
    best = 0
    for replica in range(1, len(waiting)):
        if waiting[replica] + running[replica] < waiting[best] + running[best]:
            best = replica
    return best


@router(prefix="index")
def cache_aware(prompt_tokens, waiting, running, prefix_tokens, index_tokens):
    """The longest indexed prefix, the fewest indexed tokens, or the least load (SGLang's and vLLM's router).

    With the defaults of both routers: the least loaded replica gets the request while the most loaded has over 64
    requests more and over 1.5 times as many. Otherwise the replica with the longest prefix gets it if that prefix is
    over 0.3 of the prompt, and else the replica with the fewest indexed tokens.
    """
    low, high, longest, smallest = 0, 0, 0, 0
    for replica in range(1, len(waiting)):
        load = waiting[replica] + running[replica]
        low = replica if load < waiting[low] + running[low] else low
        high = replica if load > waiting[high] + running[high] else high
        longest = replica if prefix_tokens[replica] > prefix_tokens[longest] else longest
        smallest = replica if index_tokens[replica] < index_tokens[smallest] else smallest
    least, most = waiting[low] + running[low], waiting[high] + running[high]
    if most - least > 64 and most > 1.5 * least:
        return low
    return longest if prefix_tokens[longest] > 0.3 * prompt_tokens else smallest


def _llm_d(draw_a, prompt_tokens, total_blocks, waiting, free_blocks, prefix_tokens):
    """The highest score of prefix (weight 3), queue (2) and free memory (2), the default of llm-d."""
    fewest, most = waiting[0], waiting[0]
    for replica in range(1, len(waiting)):
        fewest, most = min(fewest, waiting[replica]), max(most, waiting[replica])
    best, highest, equals = 0, -1.0, 0
    for _ in range(2):  # the second pass takes one of the equals that the first has counted
        chosen, equals = int(draw_a * equals), 0
        for replica in range(len(waiting)):
            queue = (most - waiting[replica]) / (most - fewest) if most > fewest else 1.0
            score = 3 * prefix_tokens[replica] / prompt_tokens + 2 * queue + 2 * free_blocks[replica] / total_blocks
            if score > highest:
                highest, equals, best = score, 0, replica
            if score == highest:
                best = replica if equals == chosen else best
                equals += 1
    return best


prefix_precise = router(name="prefix_precise", prefix="cache")(_llm_d)
prefix_approximate = router(name="prefix_approximate", prefix="index")(_llm_d)


@router(prefix="cache")
def uncached_work(prompt_tokens, waiting, running, prefix_tokens):
    """The least product of uncached prompt tokens and requests on the replica (lmetric, proposed for SGLang)."""
    best, least = 0, 0
    for replica in range(len(waiting)):
        work = (prompt_tokens - prefix_tokens[replica]) * (waiting[replica] + running[replica] + 1)
        if replica == 0 or work < least:
            best, least = replica, work
    return best


@router(prefix="cache")
def uncached_load(prompt_tokens, waiting, running, tokens, prefix_tokens):
    """The least u^2 r t: u uncached prompt tokens, r requests with this one, t their prompt and predicted tokens."""
    best, least = 0, 0.0
    for replica in range(len(waiting)):
        uncached = 1.0 * (prompt_tokens - prefix_tokens[replica])
        load = (waiting[replica] + running[replica] + 1.0) * (tokens[replica] + prompt_tokens)
        if replica == 0 or uncached * uncached * load < least:
            best, least = replica, uncached * uncached * load
    return best
