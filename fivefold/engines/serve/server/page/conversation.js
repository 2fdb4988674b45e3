// The conversation: what was said, and how it is shown.

import { show } from "./prose.js";

const CLOSE = 40;  // pixels from the end at which the reader is taken to follow along

export class Conversation {
  constructor(element) {
    this.element = element;
    this.welcome = element.firstElementChild;
    this.turns = [];
  }

  clear() {
    this.turns = [];
    this.element.replaceChildren(this.welcome);
  }

  messages(system) {
    const said = this.turns.map(({ role, content }) => ({ role, content }));
    return system ? [{ role: "system", content: system }, ...said] : said;
  }

  say(role, content = "") {
    this.welcome.remove();
    const turn = new Turn(role, content, this.element);
    this.turns.push(turn);
    this.element.scrollTop = this.element.scrollHeight;
    return turn;
  }

  // An answer and its question stay on the page, but are not sent again.
  forget(answer) {
    const place = this.turns.indexOf(answer);
    if (place > 0) this.turns.splice(place - 1, 2);
  }
}

class Turn {
  constructor(role, content, list) {
    this.role = role;
    this.content = content;
    this.thoughts = "";
    this.list = list;
    this.article = add(list, "article", `message ${role}`);
    this.article.setAttribute("aria-label", role === "user" ? "You" : "Model");
    this.said = add(this.article, "div", "said");
    this.draw();
  }

  add(content, reasoning) {
    this.content += content;
    this.thoughts += reasoning;
    if (!this.drawing) this.drawing = requestAnimationFrame(() => this.draw());
  }

  wait(waiting) {
    this.article.classList.toggle("waiting", waiting);
    if (!waiting) this.draw();
  }

  about(text, kind = "about") {
    this.follow(() => { add(this.article, "p", kind).textContent = text; });
  }

  draw() {
    cancelAnimationFrame(this.drawing);
    this.drawing = 0;
    this.follow(() => {
      if (this.thoughts) this.reasoning().textContent = this.thoughts;
      if (this.role === "user") this.said.textContent = this.content;
      else show(this.said, this.content);
    });
  }

  reasoning() {
    if (!this.reasons) {
      const details = document.createElement("details");
      details.className = "reasoning";
      add(details, "summary").textContent = "Reasoning";
      this.reasons = add(details, "div");
      this.said.before(details);
    }
    return this.reasons;
  }

  // A reader who is at the end stays there; one who scrolled back is left alone.
  follow(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.list;
    change();
    if (scrollHeight - scrollTop - clientHeight < CLOSE) this.list.scrollTop = this.list.scrollHeight;
  }
}

function add(parent, name, className = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  parent.append(element);
  return element;
}
