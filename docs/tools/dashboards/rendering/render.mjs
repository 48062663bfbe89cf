// node render.mjs DASHBOARDS.json FROM TO FOLDER: a picture or two of each dashboard, from and to in
// seconds since 1970. Exits with 1 if a page raises an error. To be looked at.
// Beforehand: npm install --legacy-peer-deps. CHROMIUM says where the browser is.
import { build } from 'esbuild';
import fs from 'node:fs';
import path from 'node:path';
import { chromium } from 'playwright-core';

const WIDTH = 1200;
// Of a picture; a dashboard that is higher is cut in two between rows.
const MOST_HEIGHT = 2500;
const here = import.meta.dirname;
const [dashboards, from, to, folder] = process.argv.slice(2);
// Each must be there once: their contexts are compared by identity.
const shared = ['react', 'react-dom', '@tanstack/react-query', '@perses-dev/plugin-system', '@perses-dev/components'];
shared.push('@perses-dev/core', '@perses-dev/dashboards', 'react-router-dom', '@mui/material', '@emotion/react', 'echarts');
const built = await build({
    entryPoints: [path.join(here, 'app.jsx')],
    bundle: true,
    write: false,
    outfile: 'app.js',
    jsx: 'automatic',
    define: { global: 'window', 'process.env.NODE_ENV': '"production"', 'process.env': '{}' },
    alias: Object.fromEntries(shared.map((name) => [name, path.join(here, 'node_modules', name)])),
    loader: { '.woff2': 'dataurl', '.woff': 'dataurl', '.ttf': 'dataurl', '.svg': 'dataurl', '.png': 'dataurl' },
    logLevel: 'error',
});
const script = built.outputFiles.find((file) => file.path.endsWith('.js'));
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
  args: ['--no-sandbox'],
});
let failed = false;
for (const dashboard of JSON.parse(fs.readFileSync(dashboards, 'utf8'))) {
  const page = await browser.newPage({ viewport: { width: WIDTH, height: 600 } });
  const errors = new Set();
  page.on('pageerror', (error) => errors.add(String(error)));
  page.on('console', (said) => said.type() === 'error' && errors.add(said.text()));
  // At Prometheus' own address, so that the page may ask it.
  const address = `${dashboard.spec.datasources.prometheus.plugin.spec.directUrl}/-/dashboard`;
  await page.route(`${address}*`, (route) =>
    route.fulfill({ contentType: 'text/html', body: '<!doctype html><div id="root"></div>' })
  );
  await page.goto(`${address}?start=${from * 1000}&end=${to * 1000}`);
  await page.addScriptTag({ content: script.text });
  await page.evaluate(
    ([one, start, end]) => window.show(one, { start: new Date(start * 1000), end: new Date(end * 1000) }),
    [dashboard, from, to]
  );
  const headings = dashboard.spec.layouts.map((row) =>
    page.getByRole('heading', { name: row.spec.display.title, exact: true })
  );
  await headings[0].waitFor();
  // Panels below the window are drawn only when they are seen.
  const height = await page.evaluate(() => document.documentElement.scrollHeight);
  await page.setViewportSize({ width: WIDTH, height });
  await page.waitForLoadState('networkidle');
  await page.waitForTimeout(2000);
  console.log(`${dashboard.metadata.name}: ${Object.keys(dashboard.spec.panels).length} panels, ${errors.size} errors`);
  errors.forEach((error) => console.log(error));
  failed ||= errors.size > 0;
  // Without what is above the first row: buttons that a picture has no use for.
  const tops = await Promise.all(headings.map(async (one) => (await one.boundingBox()).y - 16));
  const middle = (tops[0] + height) / 2;
  const nearest = tops.reduce((best, top) => (Math.abs(top - middle) < Math.abs(best - middle) ? top : best));
  const cuts = height - tops[0] > MOST_HEIGHT ? [tops[0], nearest, height] : [tops[0], height];
  for (let part = 1; part < cuts.length; part++) {
    const name = `${dashboard.metadata.name}${part > 1 ? `-${part}` : ''}.png`;
    const clip = { x: 0, y: cuts[part - 1], width: WIDTH, height: cuts[part] - cuts[part - 1] };
    await page.screenshot({ path: path.join(folder, name), fullPage: true, clip });
  }
  await page.close();
}
await browser.close();
process.exit(failed ? 1 : 0);
