// Answers of the server: events of a stream, and errors as one line.

export class ServerError extends Error {}

export async function* chat(body, key, signal) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const answer = await reach("v1/chat/completions", {
    method: "POST", headers, signal,
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
  });
  if (!answer.ok) throw new ServerError(await reason(answer));
  for await (const data of eventsOf(answer.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(event.error.message);
    yield event;
  }
  throw new ServerError("The connection ended before the answer did.");
}

export async function engine() {
  const answer = await reach("engine", { cache: "no-store", signal: AbortSignal.timeout(5000) });
  if (!answer.ok) throw new ServerError(await reason(answer));
  return answer.json();
}

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer.");
  }
}

async function reason(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The server answered ${answer.status}.`;
  }
}

// The data of server-sent events. The server writes one line of data an event.
async function* eventsOf(stream) {
  const reader = stream.getReader(), decoder = new TextDecoder();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The connection broke.");
    });
    if (done) return;
    held += decoder.decode(value, { stream: true });
    const lines = held.split("\n");
    held = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}
