"""HTML pages as tests read them."""

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input", "wbr"}


class Page(HTMLParser):
    """Checks nesting, unique ids and references as it reads."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))
        assert set(self.references) <= set(self.ids)

    def handle_starttag(self, tag, attributes) -> None:
        assert len({name for name, _ in attributes}) == len(attributes), f"an attribute twice in <{tag}>"
        self.tags.append(tag)
        for name, value in attributes:
            assert name not in ("src", "href", "srcset", "onload", "onclick", "action"), f"{name} in <{tag}>"
            if name == "id":
                self.ids.append(value)
            if name == "aria-labelledby":
                self.references.append(value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes) -> None:
        assert "svg" in self.open, f"<{tag}/> outside SVG"
        self.tags.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.text += data
