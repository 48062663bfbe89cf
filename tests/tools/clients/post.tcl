# Posts a body by Tcl's client.
package require http
fconfigure stdout -encoding utf-8
lassign $argv url body
set token [http::geturl $url -query $body -type application/json]
puts -nonewline [http::data $token]
