def penalty(length: int, max_tokens: int, buffer: int) -> float:
    """DAPO's soft overlong penalty, added to the reward (arXiv 2503.14476, eq. 13): from 0 to −1 over the last `buffer`
    tokens.

    0 up to max_tokens − buffer, then (max_tokens − buffer − length) / buffer, −1 above max_tokens. buffer = 0: 0 or −1.
    """
    over = length - (max_tokens - buffer)
    if over <= 0:
        return 0.0
    return -1.0 if over >= buffer else -over / buffer
