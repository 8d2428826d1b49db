"""HiPRAG's Algorithms 2 and 3 line by line, as slow as they are printed: what the checker is held against."""

from __future__ import annotations


def between(text: str, opening: str, closing: str) -> tuple[int, int] | None:
    """SPANBETWEEN: where the opening tag begins and where the closing one behind it does."""
    start = text.find(opening)
    end = text.find(closing, start + len(opening)) if start >= 0 else -1
    return (start, end) if end >= 0 else None


def count(text: str, tag: str) -> bool:
    return text.count(f"<{tag}>") == 1 and text.count(f"</{tag}>") == 1


def format_checker(y: str) -> tuple[int, int]:
    """Algorithm 2: F(T) and N(T), or (0, -1)."""
    y = y.replace("\r\n", "\n")  # 1
    if not count(y, "think"):  # 2
        return 0, -1
    span = between(y, "<think>", "</think>")  # 3
    if span is None:
        return 0, -1
    if y[: span[0]].strip() != "":  # 4
        return 0, -1
    t = y[span[0] + len("<think>") : span[1]]  # 5
    post = y[span[1] + len("</think>") :]  # 6
    if not post.lstrip().startswith("<answer>"):  # 7
        return 0, -1
    if not count(post, "answer"):  # 8
        return 0, -1
    opened, closed = between(post, "<answer>", "</answer>")  # type: ignore[misc]
    if post[opened + len("<answer>") : closed].strip() == "":  # 9, 10
        return 0, -1
    if post[closed + len("</answer>") :].strip() != "":  # 11
        return 0, -1
    p = n = 0  # 13
    while True:  # 14
        j = t.find("<step>", p)  # 15
        if j == -1:  # 16
            if t[p:].strip() != "":  # 17
                return 0, -1
            break  # 18
        if t[p:j].strip() != "":  # 20
            return 0, -1
        k = t.find("</step>", j)  # 21
        if k == -1:  # 22
            return 0, -1
        if not validate_step(t[j + len("<step>") : k]):  # 23, 24
            return 0, -1
        p, n = k + len("</step>"), n + 1  # 25
    return (1, n) if n >= 1 else (0, -1)  # 27, 28


def validate_step(s: str) -> bool:
    """Algorithm 3. A gap `[r_c : q_o]` starts behind the closing tag."""
    s = s.strip()  # 1
    if not count(s, "reasoning"):  # 2
        return False
    r = between(s, "<reasoning>", "</reasoning>")  # 3
    if r is None or s[: r[0]].strip() != "":  # 4
        return False
    if not count(s, "conclusion"):  # 5
        return False
    c = between(s, "<conclusion>", "</conclusion>")  # 6
    if c is None or c[0] <= r[1]:  # 7
        return False
    if s[c[1] + len("</conclusion>") :].strip() != "":  # 8
        return False
    behind_r = r[1] + len("</reasoning>")
    if "<search>" in s or "<context>" in s:  # 10
        if not count(s, "search") or not count(s, "context"):  # 11, 12
            return False
        q = between(s, "<search>", "</search>")  # 13
        x = between(s, "<context>", "</context>")  # 14
        if q is None or x is None or r[1] >= q[0] or q[1] >= x[0] or x[1] >= c[0]:  # 15
            return False
        gaps = s[behind_r : q[0]], s[q[1] + len("</search>") : x[0]], s[x[1] + len("</context>") : c[0]]
        return all(gap.strip() == "" for gap in gaps)  # 16, 17
    return s[behind_r : c[0]].strip() == ""  # 21, 22
