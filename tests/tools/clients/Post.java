import java.net.HttpURLConnection;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

/** Posts a body by each of Java's two clients; by default the newer one asks for HTTP/2. */
class Post {
    public static void main(String[] args) throws Exception {
        var to = URI.create(args[1]);
        System.out.print(args[0].equals("new") ? byHttpClient(to, args[2]) : byConnection(to, args[2]));
    }

    static String byHttpClient(URI to, String body) throws Exception {
        var request = HttpRequest.newBuilder(to)
            .header("content-type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(body))
            .build();
        return HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString()).body();
    }

    static String byConnection(URI to, String body) throws Exception {
        var connection = (HttpURLConnection) to.toURL().openConnection();
        connection.setDoOutput(true);
        connection.setRequestProperty("content-type", "application/json");
        connection.getOutputStream().write(body.getBytes("UTF-8"));
        return new String(connection.getInputStream().readAllBytes(), "UTF-8");
    }
}
