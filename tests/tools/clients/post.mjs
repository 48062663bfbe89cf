// Posts a body by each of Node's two clients.
import http from "node:http";

const [by, url, body] = process.argv.slice(2);
const headers = { "content-type": "application/json" };
if (by === "fetch") {
  const answer = await fetch(url, { method: "POST", headers, body });
  for await (const part of answer.body) process.stdout.write(part);
} else {
  const call = http.request(url, { method: "POST", headers }, (answer) => answer.pipe(process.stdout));
  call.end(body);
}
